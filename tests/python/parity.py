"""A sharded model trained beside its unsharded twin, which sees every rank's batch in turn and adds the gradients.

With small integers in fp32, a sum as loss and a power of two as divide factor no operation rounds, so the two must agree bit
for bit, whatever the order of sums. The comm is hostile (NaN until waited for) and the pool poisoned (NaN in returned and
fresh memory): a missing wait, stale memory or a padding that leaks shows as a difference.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raggedfsdp import _C
from raggedfsdp._state import UnitState, units_in
from raggedfsdp.comm import wrap_comms
from raggedfsdp.tensor import RaggedDTensor

Loss = Callable[[nn.Module, Any], torch.Tensor]


def integers(*shape: int, low: int = -2, high: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(low, high + 1, shape).to(dtype)


def make_integer_(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(integers(*p.shape))
    return module


def batch(step: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on every rank that asks for it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


class Traffic:
    """The comm of what is sharded inside `watch()`: hostile, and recorded as the engine sees it."""

    def __init__(self) -> None:
        self.hostile: Any = None
        self.recording: Any = None

    def wrap(self, comm: _C.Comm) -> _C.Comm:
        self.hostile = _C.make_hostile_comm(comm)
        self.recording = _C.make_recording_comm(self.hostile)
        return self.recording

    def watch(self) -> Any:
        return wrap_comms(self.wrap)

    def verbs(self) -> list[str]:
        return [record.verb for record in self.recording.records()]

    def clear(self) -> None:
        self.recording.clear()


class Twin:
    def __init__(
        self,
        make: Callable[[], nn.Module],
        shard: Callable[[nn.Module], Any],
        *,
        divide: float | None = 1.0,
        tolerance: float = 0.0,
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)
        self.oracle = make()
        self.model: Any = copy.deepcopy(self.oracle)
        self.traffic = Traffic()
        with self.traffic.watch():
            shard(self.model)
        self.tolerance = tolerance
        self.factor = 1.0 / (self.world if divide is None else divide)
        for unit in self.units:
            unit.context.set_poison(True)
            if divide is not None:
                unit.core.divide_factor = divide

    @property
    def units(self) -> list[UnitState]:
        return units_in(self.model)

    @property
    def context(self) -> Any:
        return self.units[0].context

    def pairs(self) -> Iterator[tuple[str, Any, nn.Parameter]]:
        sharded, whole = dict(self.model.named_parameters()), dict(self.oracle.named_parameters())
        assert list(sharded) == list(whole)
        for name, p in sharded.items():
            yield name, p, whole[name]

    # --- a step ---

    def backward(self, loss_of: Loss, batch_of: Callable[[int], Any]) -> torch.Tensor:
        """Gradients of all ranks' batches are added to the oracle's, of this rank's batch to the model's."""
        before = {p: p.grad for p in self.oracle.parameters()}
        self.oracle.zero_grad()
        for rank in range(self.world):
            loss = loss_of(self.oracle, batch_of(rank))
            loss.backward()
            if rank == self.rank:
                want = loss.detach()
        for p, old in before.items():
            if p.grad is not None:
                p.grad.mul_(self.factor)
                p.grad = p.grad if old is None else old + p.grad
            else:
                p.grad = old
        loss = loss_of(self.model, batch_of(self.rank))
        loss.backward()
        self.same("loss", loss.detach(), want)
        return want

    def train(self, loss_of: Loss, batch_of: Callable[[int, int], Any], steps: int = 3, lr: float = 1 / 32) -> None:
        """SGD, rounded back to small integers after each step so that the next one is exact too."""
        optimisers = [torch.optim.SGD(m.parameters(), lr) for m in (self.model, self.oracle)]
        for step in range(steps):
            self.backward(loss_of, lambda rank, step=step: batch_of(step, rank))
            self.check()
            for optimiser, model in zip(optimisers, (self.model, self.oracle), strict=True):
                optimiser.step()
                optimiser.zero_grad(set_to_none=step % 2 == 0)
                round_(model)
            self.check()

    # --- what must hold between steps ---

    def same(self, what: str, came: torch.Tensor, want: torch.Tensor) -> None:
        assert came.dtype == want.dtype, f"{what}: {came.dtype}, expected {want.dtype}"
        if self.tolerance == 0.0:
            assert torch.equal(came, want), f"{what} on rank {self.rank}: {came}, expected {want}"
        else:
            torch.testing.assert_close(came, want, rtol=self.tolerance, atol=self.tolerance, msg=lambda m: f"{what}: {m}")

    def same_piece(self, what: str, came: Any, want: torch.Tensor) -> None:
        assert isinstance(came, RaggedDTensor), f"{what} is a {type(came).__name__}"
        assert came.shape == want.shape, f"{what}: {came.shape}, expected {want.shape}"
        self.same(what, came._local_tensor.detach(), came._layout.slice_of(want.detach()))

    def check(self) -> None:
        """Parameters and gradients equal the oracle's, and nothing is left gathered, waiting or full-size."""
        for name, p, q in self.pairs():
            self.same_piece(name, p, q)
            assert p.requires_grad == q.requires_grad, name
            assert (p.grad is None) == (q.grad is None), f"{name}: gradient {p.grad}, expected {q.grad}"
            if q.grad is not None:
                self.same_piece(f"{name}.grad", p.grad, q.grad)
        self.check_rest()

    def check_rest(self) -> None:
        for unit in self.units:
            for bucket in unit.core.buckets:
                assert not bucket.gathered, f"unit {unit.core.index} is still gathered"
                assert not bucket.accumulating, f"unit {unit.core.index} still accumulates"
            self.check_slots(unit)
        assert self.traffic.hostile.unwaited() == 0

    @staticmethod
    def check_slots(unit: UnitState) -> None:
        for p in unit.parameters:
            assert p.leaf.grad is None, f"{p.name} has a full-size gradient"
            assert all(slot.get() is p.sharded for slot in p.slots), f"{p.name}: the slot shows the leaf"


def round_(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.round_().clamp_(-2, 2)


def norm_of(values: list[torch.Tensor], p: float) -> float:
    """The p-norm of all values together, plainly."""
    flat = torch.cat([v.reshape(-1).double() for v in values]).abs()
    return flat.max().item() if math.isinf(p) else flat.pow(p).sum().pow(1 / p).item()
