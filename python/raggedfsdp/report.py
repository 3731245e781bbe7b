"""What a training run has to say, as plain values: the tables on the screen and the JSON file are made from these."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from raggedfsdp._state import UnitState


@dataclass(frozen=True)
class UnitReport:
    """One wrapped unit, as one rank sees it. Every rank holds `shard_numel` elements, `padding_numel` is over all ranks."""

    unit: str
    parameters: int  # elements
    tensors: int
    devices: int
    shard_numel: int
    padding_numel: int
    buckets: int
    dtype: str  # of the gathered parameters
    shard_bytes: int
    gathered_bytes_per_step: int  # the gathered buffer's size, as often as it was gathered
    reduced_bytes_per_step: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank."""

    shard_bytes: int
    pool_bytes: int  # gathered parameters and unreduced gradients
    gradient_bytes: int  # of the shards
    peak_bytes: int  # the most that these held together at any time


@dataclass(frozen=True)
class StepReport:
    step: int  # from 1
    loss: float  # mean over ranks and micro-batches
    gradient_norm: float  # before clipping
    tokens: int  # of all ranks
    seconds: float


@dataclass(frozen=True)
class ParameterDifference:
    parameter: str
    largest: float  # largest absolute difference of an element
    relative: float  # norm of the difference / norm of the change that the step made; both are the largest over steps


@dataclass(frozen=True)
class VerifyReport:
    """The sharded run beside the unsharded one. Relative differences, each the largest over steps and parameters."""

    loss: float
    gradient_norm: float
    parameter: float
    loss_tolerance: float
    gradient_norm_tolerance: float
    parameter_tolerance: float
    parameters: tuple[ParameterDifference, ...]

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return (
            self.loss <= self.loss_tolerance
            and self.gradient_norm <= self.gradient_norm_tolerance
            and self.parameter <= self.parameter_tolerance
        )


@dataclass(frozen=True)
class TrainReport:
    model: str
    parameters: int
    ranks: int
    precision: str
    steps: tuple[StepReport, ...]
    tokens_per_s: float
    units: tuple[UnitReport, ...]
    memory: MemoryReport
    verify: VerifyReport | None

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["steps"]
        values["loss"] = [s.loss for s in self.steps]
        values["gradient_norm"] = [s.gradient_norm for s in self.steps]
        values["step_seconds"] = [s.seconds for s in self.steps]
        if self.verify is not None:
            values["verify"]["passed"] = self.verify.passed
        return values


def unit_reports(model: nn.Module) -> list[UnitReport]:
    """One report per unit of a model wrapped with `fully_shard`, in the order of wrapping.

    Bytes are those of whole buffers; a step is a backward that reduced.
    """
    return [_unit_report(state) for state in sorted(_units(model), key=lambda s: s.core.index)]


def _units(model: nn.Module) -> list[UnitState]:
    from raggedfsdp._state import units_in

    states = units_in(model)
    if not states:
        from raggedfsdp import UsageError

        raise UsageError(f"{type(model).__name__} has no unit to report on; call fully_shard first")
    return states


def _unit_report(state: UnitState) -> UnitReport:
    buckets = state.core.buckets
    plans = [b.plan for b in buckets]
    steps = max(1, state.context.steps)
    return UnitReport(
        unit=state.name,
        parameters=sum(p.useful_numel() for p in plans),
        tensors=sum(len(p.tensors) for p in plans),
        devices=state.mesh.size(),
        shard_numel=sum(p.shard_numel for p in plans),
        padding_numel=sum(p.padding_numel() for p in plans),
        buckets=len(buckets),
        dtype=", ".join(dict.fromkeys(str(b.param_dtype).removeprefix("torch.") for b in buckets)),
        shard_bytes=sum(b.shard_bytes for b in buckets),
        gathered_bytes_per_step=sum(b.gathers * b.gathered_bytes for b in buckets) // steps,
        reduced_bytes_per_step=sum(b.reductions * b.plan.global_numel() * b.reduce_dtype.itemsize for b in buckets) // steps,
    )


def memory_report(model: nn.Module) -> MemoryReport:
    """What this rank holds for a model wrapped with `fully_shard`."""
    states = _units(model)
    buckets = [b for state in states for b in state.core.buckets]
    shards = sum(b.shard_bytes for b in buckets)
    gradients = sum(b.gradient_shard_bytes for b in buckets)
    context = states[0].context
    return MemoryReport(
        shard_bytes=shards,
        pool_bytes=context.pool_peak_reserved_bytes,
        gradient_bytes=gradients,
        peak_bytes=shards + gradients + context.pool_peak_bytes,
    )
