"""Activation checkpointing of both kinds, around units, inside them and across them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import models_for_tests as models
from models_for_tests import WIDTH, Block, shard_children
from parity import Twin, batch
from raggedfsdp import fully_shard, share_comm_ctx
from ranks import run_ranks

KINDS = {"none": None, "reentrant": True, "non-reentrant": False}


def maybe_checkpoint(kind: str, fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    reentrant = KINDS[kind]
    return fn(x) if reentrant is None else checkpoint(fn, x, use_reentrant=reentrant)


class Segments(nn.Module):
    """Four blocks. `segments` says which run together in one checkpoint: "01 23", "0 1 2 3", "012 23" ..."""

    def __init__(self, kind: str, segments: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kind = kind
        self.segments = segments.split()
        models.make_integer_(self)

    def run(self, segment: str, x: torch.Tensor) -> torch.Tensor:
        for index in segment:
            x = self.blocks[int(index)](x)
        return torch.relu(x) - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for segment in self.segments:
            x = maybe_checkpoint(self.kind, lambda t, segment=segment: self.run(segment, t), x)
        return x


def shard_all(reshard: bool) -> Callable[[Any], None]:
    return shard_children(*(f"blocks.{i}" for i in range(4)), reshard_after_forward=reshard)


def only_child(model: Any) -> None:
    """The segments hold modules of the root; one child only is a unit of its own."""
    fully_shard(model.blocks[2])
    fully_shard(model)


def loss(model: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    return sum((models.weighted_loss(model, x) for x in inputs), start=torch.zeros(()))


def inputs(step: int, rank: int, forwards: int) -> list[torch.Tensor]:
    return [batch(10 * step + i, rank, 2 + i, WIDTH).requires_grad_() for i in range(forwards)]


CASES = ["0 1 2 3", "01 23", "012 23", "0123", "0 12 3 1"]


def _segments(kind: str, case: str) -> None:
    for forwards, reshard in itertools.product((1, 2), (True, False)):
        for shard in (shard_all(reshard), only_child):
            twin = Twin(lambda: Segments(kind, case), shard)
            twin.train(loss, lambda step, rank, n=forwards: inputs(step, rank, n), steps=2)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_segments(kind: str, world: int) -> None:
    for case in CASES:
        run_ranks(_segments, world, 60, kind, case)


def _gathers(kind: str, case: str) -> list[int]:
    """Gathers of each block's bucket in the second step; every bucket is reduced once."""
    twin = Twin(lambda: Segments(kind, case), shard_all(reshard=True))
    for step in range(3):
        for unit in twin.units:
            for bucket in unit.core.buckets:
                bucket.gathers = bucket.reductions = 0
        twin.backward(loss, lambda rank, step=step: inputs(step, rank, 1))
        twin.check()
    buckets = [twin.model.blocks[i]._ragged_unit.core.buckets[0] for i in range(4)]
    assert [b.reductions for b in buckets] == [1] * 4
    return [b.gathers for b in buckets]


@pytest.mark.parametrize("world", [1, 2])
def test_gathers_per_step(world: int) -> None:
    for kind, case, want in [
        ("none", "0 1 2 3", {2}),
        ("reentrant", "0 1 2 3", {2}),
        ("non-reentrant", "0 1 2 3", {2}),
        ("reentrant", "01 23", {2, 3}),  # the last unit of a segment is recomputed just before its backward
        ("non-reentrant", "01 23", {2, 3}),
    ]:
        for gathers in run_ranks(_gathers, world, 60, kind, case):
            assert set(gathers) == want, (kind, case, gathers)


class Checkpointed(nn.Module):
    """A unit whose own forward checkpoints its halves; early stop may end a recompute inside the unit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.inner = Block()
        self.back = nn.Linear(WIDTH, 4)
        self.kind = kind
        models.make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = maybe_checkpoint(self.kind, lambda t: self.front(t).clamp(-4, 4), x)
        x = maybe_checkpoint(self.kind, lambda t: self.inner(t), x)
        return maybe_checkpoint(self.kind, lambda t: torch.tanh(self.back(t)).round() + self.back(t).clamp(-4, 4), x)


def _inside(kind: str) -> None:
    for names, reshard in itertools.product(((), ("inner",), ("front", "inner", "back")), (True, False)):
        twin = Twin(lambda: Checkpointed(kind), shard_children(*names, reshard_after_forward=reshard))
        twin.train(loss, lambda step, rank: inputs(step, rank, 2), steps=2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_inside_a_unit(kind: str, world: int) -> None:
    run_ranks(_inside, world, 60, kind)


def _frozen(kind: str) -> None:
    """Without gradients in a segment, and with a frozen unit first, nothing is left gathered."""

    def make() -> nn.Module:
        model = Segments(kind, "01 23")
        model.blocks[0].requires_grad_(False)
        model.blocks[3].down.requires_grad_(False)
        return model

    twin = Twin(make, shard_all(reshard=True))
    twin.train(loss, lambda step, rank: inputs(step, rank, 1), steps=2)
    with torch.no_grad():
        x = batch(5, 0, 2, WIDTH)
        twin.same("no_grad", twin.model(x), twin.oracle(x))
    twin.check()


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_units_in_segments(kind: str) -> None:
    run_ranks(_frozen, 2, 60, kind)


def _nothing_else_in_backward() -> None:
    """The only unit is recomputed, and no node of it runs: who lets go of it?"""
    torch.manual_seed(1)
    model = Segments("non-reentrant", "01")
    model.blocks[0].requires_grad_(False)
    fully_shard(model.blocks[0])
    for _ in range(2):
        models.weighted_loss(model, batch(1, 0, 2, WIDTH)).backward()
        unit = model.blocks[0]._ragged_unit
        assert not unit.core.held
        assert unit.context.pool_used_bytes == 0


def test_a_frozen_unit_recomputed_by_others_is_released() -> None:
    run_ranks(_nothing_else_in_backward, 2, 60)


class Optional(nn.Module):
    def __init__(self, kind: str, linear: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.linear = linear

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return maybe_checkpoint(self.kind, self.linear, x) if use else x * 1


class TiedApart(nn.Module):
    """Two units without a common root share a parameter, and not every rank uses it in the second."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        second = nn.Linear(WIDTH, WIDTH)
        second.weight = self.first.weight
        self.second = Optional(kind, second)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.second(self.first(x), use)


def _tied_apart(kind: str) -> None:
    def shard(model: Any) -> None:
        fully_shard(model.first)
        fully_shard(model.second)
        share_comm_ctx([model.first])  # together with what it shares a parameter with
        assert model.first._ragged_unit.context is model.second._ragged_unit.context

    def loss_of(model: nn.Module, given: tuple[torch.Tensor, bool]) -> torch.Tensor:
        x, use = given
        return models.weighted_loss(lambda x: model(x, use), x)

    twin = Twin(lambda: TiedApart(kind), shard)
    twin.train(loss_of, lambda step, rank: (batch(step, rank, 2, WIDTH).requires_grad_(), (rank + step) % 2 == 0), steps=3)


@pytest.mark.parametrize("kind", KINDS)
def test_units_without_a_common_root_share_a_parameter(kind: str) -> None:
    run_ranks(_tied_apart, 2, 60, kind)
