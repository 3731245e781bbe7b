"""A unit that the planner splits: each of its buckets is a unit of communication, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, shard_children
from parity import Twin, batch
from raggedfsdp import Granularity
from raggedfsdp._state import units_in
from ranks import run_ranks

# By number of ranks: two matrices as (rows, rows of a block) that pad less apart than together.
SHAPES = {2: ((20, 1), (28, 7)), 3: ((23, 8), (2, 1)), 4: ((8, 2), (26, 8))}


class Pair(nn.Module):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, first, bias=False)
        self.second = nn.Linear(WIDTH, second, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], dim=1)


class Model(nn.Module):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.pair = Pair(first, second)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(self.before(x))


def _twin(world: int, max_buckets: int | None) -> Twin:
    (first, first_block), (second, second_block) = SHAPES[world]

    def policy(name: str, shape: torch.Size) -> Granularity:
        blocks = {"first.weight": first_block, "second.weight": second_block}
        return Granularity.rows(blocks[name]) if name in blocks else Granularity.elements()

    options = {"orig_param_policy": policy, "max_buckets": max_buckets, "collective_cost_bytes": 0}
    return Twin(lambda: Model(first, second), shard_children("pair", **options))


def _split(world: int) -> None:
    padding = {}
    for max_buckets, expected in ((None, 2), (1, 1)):
        twin = _twin(world, max_buckets)
        (pair,) = (u for u in units_in(twin.model) if u.name == "pair")
        buckets = pair.core.buckets
        assert len(buckets) == expected
        padding[expected] = sum(b.plan.padding_numel() for b in buckets)
        twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
        for b in buckets:
            b.gathers = b.reductions = 0
        twin.backward(models.weighted_loss, lambda rank: batch(9, rank, 2, WIDTH))
        twin.check()
        assert [(b.gathers, b.reductions) for b in buckets] == [(2, 1)] * expected
    assert padding[2] < padding[1]


@pytest.mark.parametrize("world", sorted(SHAPES))
def test_split_unit(world: int) -> None:
    run_ranks(_split, world, 60, world)
