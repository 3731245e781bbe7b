"""Optimisers that step inside backward, one per parameter, as soon as its gradient is complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Adapter, Branches, Tied, shard_blocks, shard_children, shard_root
from modes import buckets_of
from parity import Twin, batch, round_
from raggedfsdp import fully_shard
from ranks import run_ranks
from test_engine_checkpointing import KINDS, Segments, shard_all


class InBackward:
    """One optimiser per parameter; counts its steps."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.steps: dict[str, int] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.hook(name, make([p])))

    def hook(self, name: str, optimiser: torch.optim.Optimizer) -> Callable[[Any], None]:
        def hook(p: Any) -> None:
            optimiser.step()
            p.grad = None
            self.steps[name] = self.steps.get(name, 0) + 1

        return hook


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1 / 32)


def step(twin: Twin, loss: Any, batches: list[Callable[[int], Any]], oracle: torch.optim.Optimizer) -> None:
    """Micro-batches without synchronisation, the last with. The oracle sums all and steps once."""
    for i, micro in enumerate(batches):
        for rank in range(twin.world):
            loss(twin.oracle, micro(rank)).backward()
        twin.model.set_requires_gradient_sync(i == len(batches) - 1)
        loss(twin.model, micro(twin.rank)).backward()
    for p in twin.oracle.parameters():
        if p.grad is not None:
            p.grad.mul_(twin.factor)
    oracle.step()
    oracle.zero_grad()
    twin.check()


def _trains(twin: Twin, loss: Any, inputs: Callable[[int, int], Any], micros: int, steps: int = 3) -> InBackward:
    inside, oracle = InBackward(twin.model, sgd), sgd(twin.oracle.parameters())
    for n in range(steps):
        batches = [lambda rank, m=m: inputs(m, rank) for m in range(10 * n, 10 * n + micros)]
        step(twin, loss, batches, oracle)
        assert set(inside.steps.values()) == {n + 1}
        reductions = {b.reductions for b in buckets_of(twin)} - {0}  # a frozen bucket has none
        assert min(reductions) == n + 1
        assert max(reductions) == n + 1 or getattr(twin.oracle, "kind", "") == "reentrant", "reduced more than once"
        for model in (twin.model, twin.oracle):
            round_(model)
    return inside


def in_groups(model: Any) -> None:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2].up, model.blocks[2].down])
    fully_shard(model)


def _checkpointed(kind: str) -> None:
    shards = (shard_all(True), shard_all(False), shard_root(), in_groups)
    for shard, case, micros in itertools.product(shards, ("0 1 2 3", "01 23"), (1, 2)):
        if kind == "reentrant" and shard is in_groups and micros > 1:
            continue  # each inner backward reduces what it has: a hook may fire once per part
        twin = Twin(lambda case=case: Segments(kind, case), shard)
        _trains(twin, models.weighted_loss, lambda n, rank: batch(n, rank, 2, WIDTH).requires_grad_(), micros)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_backward(kind: str, world: int) -> None:
    run_ranks(_checkpointed, world, 100, kind)


def _parts() -> None:
    """Frozen weights never step; a tied one steps once; one that other ranks use steps here too."""
    for reshard in (True, False):
        twin = Twin(Adapter, shard_root(reshard_after_forward=reshard))
        _trains(twin, models.weighted_loss, lambda n, rank: batch(n, rank, 3, 8), 2)
        twin = Twin(Tied, shard_children("embedding", "body", "head", reshard_after_forward=reshard))
        inside = _trains(twin, models.weighted_loss, lambda n, rank: (torch.arange(4) + n + rank) % 10, 2)
        assert "embedding.weight" in inside.steps
    twin = Twin(Branches, shard_root())
    inside, oracle = InBackward(twin.model, sgd), sgd(twin.oracle.parameters())
    for n, plan in enumerate((["a", "b", "b"], ["ab", "a", "a"], ["b", "b", "a"])):
        args = lambda rank, n=n, plan=plan: (batch(n, rank, 2, WIDTH), plan[rank])  # noqa: E731
        step(twin, lambda model, a: model(*a).sum(), [args], oracle)
        for model in (twin.model, twin.oracle):
            round_(model)
    used = {"layers.a.weight", "layers.a.bias", "layers.b.weight", "layers.b.bias"}
    assert set(inside.steps) == (used if twin.world > 1 else set(inside.steps) & used)


def _registered_again_after_a_change_of_dtype() -> None:
    """`.to()` swaps the insides of parameters, those of torch's list of hooks among them."""
    twin = Twin(models.Stack, shard_blocks())
    fired = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        twin.model.to(dtype)
        parameter = twin.model.blocks[0].up.weight
        handle = parameter.register_post_accumulate_grad_hook(lambda p, dtype=dtype: fired.append(dtype))
        models.weighted_loss(twin.model, batch(0, twin.rank, 2, WIDTH).to(dtype)).backward()
        handle.remove()
        twin.model.zero_grad()
    assert fired == [torch.float32, torch.float64, torch.float32]


def _state() -> None:
    """Momentum, weight decay and Adam's moments, in fp64."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    ]
    for make in makers:
        twin = Twin(lambda: models.Stack().double(), shard_blocks(), divide=None, tolerance=1e-10)
        InBackward(twin.model, make)
        oracle = make(twin.oracle.parameters())
        for n in range(4):
            step(twin, models.weighted_loss, [lambda rank, n=n: batch(n, rank, 2, WIDTH).double() / 8], oracle)


@pytest.mark.parametrize("world", [2, 3])
def test_parts_and_state(world: int) -> None:
    run_ranks(_parts, world, 60)
    run_ranks(_state, world, 60)
    run_ranks(_registered_again_after_a_change_of_dtype, world, 60)
