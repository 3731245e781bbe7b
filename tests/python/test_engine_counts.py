"""The claims, counted: collectives per bucket and step, no copy after a gather, no full-size gradient, constant memory."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Adapter, Branches, Stack, shard_blocks, shard_children, shard_root
from parity import Twin, batch
from raggedfsdp import MixedPrecisionPolicy
from ranks import run_ranks


def buckets_of(twin: Twin) -> list[Any]:
    return [bucket for unit in twin.units for bucket in unit.core.buckets]


def start_counting(twin: Twin) -> None:
    twin.traffic.clear()
    twin.context.clear_events()
    for bucket in buckets_of(twin):
        bucket.gathers = bucket.reductions = 0


def step_of(twin: Twin, step: int) -> None:
    for model in (twin.model, twin.oracle):
        model.zero_grad()
    twin.backward(models.weighted_loss, lambda rank: batch(step, rank, 2, WIDTH))
    twin.check()


def _collectives(reshard: bool | None, events_by_step: bool) -> list[Any]:
    """Every step costs the same collectives and no others; from the second on, gathers run ahead."""
    twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
    gathers = {True: [2] * 4, False: [1] * 4, None: [1, 2, 2, 2]}[reshard]  # the root comes first
    log = []
    for step in range(4):
        start_counting(twin)
        step_of(twin, step)
        buckets = buckets_of(twin)
        assert [b.gathers for b in buckets] == gathers
        assert [b.reductions for b in buckets] == [1] * 4
        assert Counter(twin.traffic.verbs()) == {"all_gather": sum(gathers), "reduce_scatter": 4, "all_reduce": 1}
        events = twin.context.events
        kinds = Counter(kind for kind, _, _ in events)
        assert kinds["gather"] == sum(gathers)
        assert kinds["reduce"] == kinds["publish"] == 4
        assert kinds["usage"] == 1
        assert kinds["release"] == sum(gathers)
        assert kinds["prefetch"] == (0 if step == 0 else sum(gathers) - (2 if gathers[0] == 2 else 1))
        log.append(events if events_by_step else None)
    return log


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_of_a_step(world: int) -> None:
    for reshard in (True, False, None):
        first, *others = run_ranks(_collectives, world, 60, reshard, True)
        assert all(other == first for other in others), "ranks disagree on the order"


def _without_graph() -> None:
    twin = Twin(Stack, shard_blocks())
    start_counting(twin)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            twin.model(batch(0, 0, 2, WIDTH))
    assert twin.traffic.verbs() == ["all_gather"] * 8
    twin.model.set_requires_gradient_sync(False)
    start_counting(twin)
    models.weighted_loss(twin.model, batch(0, 0, 2, WIDTH)).backward()
    assert set(twin.traffic.verbs()) == {"all_gather"}


def _frozen_and_unused() -> None:
    """Frozen buckets are never reduced; unused parameters cost no further collective."""
    twin = Twin(lambda: nn.Sequential(Adapter(WIDTH), Adapter(WIDTH)), shard_children("0", "1"))
    start_counting(twin)
    step_of(twin, 0)
    assert Counter(twin.traffic.verbs()) == {"all_gather": 8, "reduce_scatter": 2, "all_reduce": 1}
    twin = Twin(Branches, shard_root(reshard_after_forward=True))
    for names in ("a", "ab", "abc"):
        start_counting(twin)
        twin.model(batch(0, 0, 2, WIDTH), names).sum().backward()
        assert Counter(twin.traffic.verbs()) == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}


def _changing_order() -> list[Any]:
    """A frozen order that no longer holds predicts wrongly: that may cost gathers, never correctness or a leak."""
    twin = Twin(Stack, shard_blocks())
    for step, order in enumerate([(0, 1, 2), (0, 1, 2), (2, 1, 0), (2, 1, 0), (1,), (0, 0, 2, 1), (0, 1, 2)]):

        def loss(model: Any, x: torch.Tensor, order: tuple[int, ...] = order) -> torch.Tensor:
            kept = model.blocks
            model.blocks = nn.ModuleList(kept[i] for i in order)
            try:
                return models.weighted_loss(model, x)
            finally:
                model.blocks = kept

        for model in (twin.model, twin.oracle):
            model.zero_grad()
        twin.backward(loss, lambda rank, step=step: batch(step, rank, 2, WIDTH))
        twin.check()
    return twin.context.events


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_of_other_steps(world: int) -> None:
    run_ranks(_without_graph, world, 60)
    run_ranks(_frozen_and_unused, world, 60)
    first, *others = run_ranks(_changing_order, world, 60)
    assert all(other == first for other in others)


def _pointers(param_dtype: torch.dtype | None) -> None:
    """A gathered parameter is a view of the buffer that the all-gather wrote, in forward and in backward."""
    twin = Twin(Stack, shard_blocks(mp_policy=MixedPrecisionPolicy(param_dtype, param_dtype)))
    seen: list[str] = []

    def inside(unit: Any, when: str) -> None:
        records = {r.data: r for r in twin.traffic.recording.records() if r.verb == "all_gather"}
        for p in unit.parameters:
            plan = unit.core.buckets[p.bucket].plan
            at = p.leaf.data_ptr() - plan.offsets[p.slot] * p.leaf.element_size()
            assert at in records, f"{p.name}: not in the gathered buffer ({when})"
            assert records[at].numel == plan.global_numel()
            assert p.leaf.grad is None
            assert all(slot.get() is p.leaf for slot in p.slots) or when == "backward"
        seen.append(when)

    for block in twin.model.blocks:
        unit = block._ragged_unit
        block.down.register_forward_hook(lambda m, a, out, unit=unit: (inside(unit, "forward"), out)[1])
        block.up.register_forward_hook(
            lambda m, a, out, unit=unit: out.register_hook(lambda g, unit=unit: inside(unit, "backward")) and None
        )
    for step in range(2):
        models.weighted_loss(twin.model, batch(step, twin.rank, 2, WIDTH)).backward()
    assert Counter(seen) == {"forward": 6, "backward": 6}


def _gradient_pointers() -> None:
    """`.grad` is a view of the bucket's gradient shard, the same tensor at every step."""
    twin = Twin(Stack, shard_blocks())
    before: dict[str, torch.Tensor] = {}
    for step in range(3):
        step_of(twin, step)
        for unit in twin.units:
            for p in unit.parameters:
                local = p.sharded.grad._local_tensor
                view = unit.core.buckets[p.bucket].gradient_view(p.slot)
                assert local.numel() == 0 or local.data_ptr() == view.data_ptr()
                assert before.setdefault(f"{unit.core.index} {p.name}", p.sharded.grad) is p.sharded.grad


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_is_copied_out(world: int) -> None:
    run_ranks(_pointers, world, 60, None)
    run_ranks(_pointers, world, 60, torch.bfloat16)
    run_ranks(_gradient_pointers, world, 60)


HIDDEN = 64


def deep(depth: int, reshard: bool = True) -> Twin:
    return Twin(lambda: Stack(depth, WIDTH, HIDDEN), shard_blocks(reshard_after_forward=reshard))


def _memory() -> None:
    """Beside shards and gradient shards, the pool holds the same few unit buffers however many units there are."""
    pools = set()
    for depth in (3, 6, 12):
        twin = deep(depth)
        for step in range(3):
            step_of(twin, step)
        buckets = buckets_of(twin)
        unit_bytes = max(b.gathered_bytes for b in buckets)
        root_bytes = buckets[0].gathered_bytes
        pools.add((twin.context.pool_peak_reserved_bytes, twin.context.pool_peak_bytes))
        assert twin.context.pool_used_bytes == 0
        # At most: two gathered units (one ahead), two gradients (one in flight), and the root's own.
        assert twin.context.pool_peak_reserved_bytes <= 4 * unit_bytes + 2 * root_bytes
        whole = sum(p.numel() for p in twin.oracle.parameters()) * 4
        padding = sum(b.plan.padding_numel() for b in buckets) * 4
        shards = sum(b.shard_bytes for b in buckets)
        assert shards * twin.world == whole + padding
        assert sum(b.gradient_shard_bytes for b in buckets) == shards
    assert len(pools) == 1, f"the pool grows with the number of units: {pools}"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _no_growth() -> None:
    twin = deep(3)
    optimiser = torch.optim.AdamW(twin.model.parameters(), 0.01)
    marks = []
    for step in range(1, 201):
        models.weighted_loss(twin.model, batch(step, twin.rank, 2, WIDTH)).backward()
        optimiser.step()
        optimiser.zero_grad()
        if step in (10, 200):
            gc.collect()
            pool = (twin.context.pool_peak_reserved_bytes, twin.context.pool_peak_bytes)
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            marks.append((pool, tensors, len(gc.get_objects()), resident_bytes()))
            twin.traffic.clear()
    (pool, tensors, objects, resident), later = marks
    assert later[0] == pool
    # What earlier tests left may still go.
    assert later[1] <= tensors, f"{later[1]} tensors after 200 steps, {tensors} after 10"
    assert later[2] <= objects + 50
    assert later[3] <= resident + (4 << 20)
    twin.check_rest()


@pytest.mark.parametrize("world", [1, 2])
def test_memory_is_constant(world: int) -> None:
    run_ranks(_memory, world, 60)
    run_ranks(_no_growth, world, 60)
