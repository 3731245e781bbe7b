"""Pipeline schedules: several forwards before their backwards, further forwards between those, and the marks that
pipelines set around them. The oracle's gradient is that of all micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks
from modes import buckets_of, clear_counts, exact_step, micro_batch, oracle_gradients
from parity import Twin
from raggedfsdp import UsageError, fully_shard, share_comm_ctx
from ranks import run_ranks

# F: forward of a micro-batch, B: its backward, E: a forward without a graph.
SCHEDULES = {
    "fill and drain": "F0 F1 F2 F3 B0 B1 B2 B3",
    "last first": "F0 F1 F2 B2 B1 B0",
    "1F1B": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "evaluations between": "F0 E F1 B0 E F2 B1 E B2",
}
MARKS = ("none", "sync", "sync and reshard", "sync and reshard, unsharded by hand")


def actions(schedule: str) -> Iterator[tuple[str, int]]:
    for action in schedule.split():
        yield action[0], int(action[1:] or 0)


def mark(model: Any, marks: str, last: bool) -> None:
    """What torch's pipelines tell an FSDPModule before each backward."""
    if marks == "none":
        return
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    if "reshard" in marks:
        model.set_reshard_after_backward(last)


def run_schedule(twin: Twin, schedule: str, marks: str, step: int) -> list[int]:
    losses: dict[int, torch.Tensor] = {}
    left = schedule.count("B")
    micros = [micro for action, micro in actions(schedule) if action == "F"]
    for action, micro in actions(schedule):
        x = micro_batch(step, twin.rank, micro)
        if action == "E":
            with torch.no_grad():
                twin.same("evaluation", twin.model(x), twin.oracle(x))
        elif action == "F":
            losses[micro] = models.weighted_loss(twin.model, x)
            twin.same("loss", losses[micro].detach(), models.weighted_loss(twin.oracle, x).detach())
        else:
            left -= 1
            mark(twin.model, marks, last=left == 0)
            losses.pop(micro).backward()
    return micros


def units_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "unshard")]


def _schedule(reshard: bool | None) -> None:
    for (name, schedule), marks in itertools.product(SCHEDULES.items(), MARKS):
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
        for step in range(2):
            clear_counts(twin)
            if "by hand" in marks:
                for handle in [unit.unshard(async_op=True) for unit in units_of(twin.model)]:
                    handle.wait()
            micros = run_schedule(twin, schedule, marks, step)
            if "by hand" in marks:
                for unit in units_of(twin.model):
                    unit.reshard()
            oracle_gradients(twin, step, micros)
            twin.check()
            reductions = {b.reductions for b in buckets_of(twin)}
            assert reductions == {len(micros) if marks == "none" else 1}, (name, marks)
            if "reshard" in marks and reshard is False:
                assert {b.gathers for b in buckets_of(twin)} == {1}, (name, marks)
            exact_step(twin)


@pytest.mark.parametrize(("reshard", "world"), [(True, 1), (True, 3), (False, 1), (False, 2), (None, 2)])
def test_schedules(reshard: bool | None, world: int) -> None:
    run_ranks(_schedule, world, 100, reshard)


# --- several stages on one rank ---


class Stages(nn.Module):
    """Each stage is a model of its own; what goes from one to the next is cut from its graph."""

    def __init__(self, n: int = 2) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stack(2) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def shard_stages(shared: bool, reshard: bool | None) -> Any:
    def shard(model: Any) -> None:
        for stage in model.stages:
            shard_blocks(reshard_after_forward=reshard)(stage)
        if shared:
            share_comm_ctx(list(model.stages))

    return shard


# (action, stage, micro-batch) as a rank with two stages of an interleaved schedule runs them.
INTERLEAVED = {
    "breadth first": "F0.0 F0.1 F0.2 F1.0 F1.1 B1.0 F1.2 B1.1 B0.0 B1.2 B0.1 B0.2",
    "depth first": "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 F0.2 B1.1 F1.2 B0.1 B1.2 B0.2",
}


class StageRun:
    """One rank's micro-batches on their way through the stages of one model."""

    def __init__(self, model: Any, step: int, rank: int) -> None:
        self.stages, self.step, self.rank = model.stages, step, rank
        self.ends: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, stage: int, micro: int) -> None:
        x = micro_batch(self.step, self.rank, micro) if stage == 0 else self.ends[stage - 1, micro][1].detach()
        x.requires_grad_(stage > 0)
        self.ends[stage, micro] = x, self.stages[stage](x)

    def backward(self, stage: int, micro: int) -> None:
        out = self.ends[stage, micro][1]
        last = stage == len(self.stages) - 1
        out.backward(torch.ones_like(out) if last else self.ends[stage + 1, micro][0].grad)


def run_interleaved(twin: Twin, schedule: str, marks: str, step: int) -> None:
    run = StageRun(twin.model, step, twin.rank)
    left = {stage: schedule.count(f"B{stage}") for stage in range(len(twin.model.stages))}
    for action in schedule.split():
        stage, micro = (int(part) for part in action[1:].split("."))
        if action[0] == "F":
            run.forward(stage, micro)
        else:
            left[stage] -= 1
            mark(twin.model.stages[stage], marks, last=left[stage] == 0)
            run.backward(stage, micro)


def whole_backward(model: nn.Module, step: int, rank: int, micro: int) -> None:
    model(micro_batch(step, rank, micro)).sum().backward()


def _interleaved(shared: bool) -> None:
    for reshard, schedule, marks in itertools.product((True, False), INTERLEAVED.values(), MARKS[:3]):
        twin = Twin(Stages, shard_stages(shared, reshard))
        contexts = {unit.context for unit in twin.units}
        assert len(contexts) == (1 if shared else 2)
        for step in range(2):
            run_interleaved(twin, schedule, marks, step)
            oracle_gradients(twin, step, range(3), whole_backward)
            twin.check()
            exact_step(twin)
        assert all(unit.context.pool_used_bytes == 0 for unit in twin.units)


@pytest.mark.parametrize(("shared", "world"), [(True, 1), (True, 3), (False, 2)])
def test_two_stages_on_a_rank(shared: bool, world: int) -> None:
    run_ranks(_interleaved, world, 100, shared)


def _pool_is_shared() -> None:
    """Stages that share a context take turns with its memory."""
    reserved = {}
    for shared in (True, False):
        twin = Twin(Stages, shard_stages(shared, True))
        for step in range(3):
            run_interleaved(twin, INTERLEAVED["breadth first"], "none", step)
            twin.model.zero_grad()
        pools = {context: context.pool_peak_reserved_bytes for context in (unit.context for unit in twin.units)}
        reserved[shared] = sum(pools.values())
    assert reserved[True] < reserved[False]
    with pytest.raises(UsageError, match="outermost"):
        share_comm_ctx([twin.model.stages[0].blocks[0]])
    with pytest.raises(UsageError, match="fully_shard"):
        share_comm_ctx([nn.Linear(WIDTH, WIDTH)])  # type: ignore[list-item]
    layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    for layer in layers:
        fully_shard(layer)
    share_comm_ctx(list(layers))
    layers[1](layers[0](torch.ones(1, WIDTH))).sum().backward()
    assert all(p.grad is not None for p in layers.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_shared_context(world: int) -> None:
    run_ranks(_pool_is_shared, world, 60)


# --- backward split in two, as zero-bubble schedules do it ---


def _split() -> None:
    """The weights' half puts gradients on what the model shows: refused, where they would be lost."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    fully_shard(model, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.unshard()
    x = micro_batch(0, 0, 0).requires_grad_()
    y = model(x)
    weights = list(model.parameters())
    gradients, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    torch.testing.assert_close(gradients[0], torch.ones_like(y) @ (weights[1] @ weights[0]))
    stage_backward_weight(iter(weights), groups)
    with pytest.raises(UsageError, match="would be lost"):
        model.reshard()


def test_split_backward_is_refused() -> None:
    run_ranks(_split, 2, 60)
