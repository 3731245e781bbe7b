"""What the tests of modes share: the oracle's gradient of many micro-batches, and a step that stays exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH
from parity import Twin, batch, round_

Backward = Callable[[nn.Module, int, int], None]  # of one rank's micro-batch, through a whole model


def micro_batch(step: int, rank: int, micro: int) -> torch.Tensor:
    return batch(100 * step + micro, rank, 2, WIDTH)


def plain_backward(model: nn.Module, step: int, rank: int, micro: int) -> None:
    models.weighted_loss(model, micro_batch(step, rank, micro)).backward()


def oracle_gradients(twin: Twin, step: int, micros: Iterable[int], backward: Any = plain_backward) -> None:
    """The oracle's `.grad` becomes the sum over all ranks and micro-batches, divided as the twin's."""
    twin.oracle.zero_grad()
    for rank in range(twin.world):
        for micro in micros:
            backward(twin.oracle, step, rank, micro)
    for p in twin.oracle.parameters():
        if p.grad is not None:
            p.grad.mul_(twin.factor)


def exact_step(twin: Twin, lr: float = 1 / 32) -> None:
    """SGD on both, rounded so that the next step is exact too."""
    for model in (twin.model, twin.oracle):
        torch.optim.SGD(model.parameters(), lr).step()
        model.zero_grad()
        round_(model)
    twin.check()


def buckets_of(twin: Twin) -> Iterator[Any]:
    for unit in twin.units:
        yield from unit.core.buckets


def clear_counts(twin: Twin) -> None:
    for bucket in buckets_of(twin):
        bucket.gathers = bucket.reductions = 0


def spoil_padding(twin: Twin, value: float) -> int:
    """`value` wherever a shard or a gradient shard holds no parameter. The number of elements spoilt, over all ranks."""
    spoilt = torch.zeros(())
    for bucket in buckets_of(twin):
        plan = bucket.plan
        padding = torch.ones(plan.shard_numel, dtype=torch.bool)
        for i in range(bucket.size):
            owned = plan.owned(i, twin.rank)
            begin = plan.offsets[i] + owned.begin - twin.rank * plan.shard_numel
            padding[begin : begin + owned.numel()] = False
        gradient = torch.empty(0).set_(bucket.gradient_view(0).untyped_storage(), 0, (plan.shard_numel,))
        for flat in (bucket.shard(), gradient):
            flat[padding] = value
        spoilt += padding.sum()
    torch.distributed.all_reduce(spoilt)
    return int(spoilt)
