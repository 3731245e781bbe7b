"""Modules and modes of torch's own: RNNs, attention, sparse gradients, autocast, compiled blocks; units held by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks, shard_children, shard_root
from parity import Twin, batch
from raggedfsdp import UsageError
from ranks import run_ranks
from test_engine_optimisers import real, real_batch


class Recurrent(nn.Module):
    """RNNs keep a flat list of their weights beside the registered ones; attention has a weight for three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(10, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x[None])
        z, _ = self.attention(y, y, y)
        return self.norm(z[0])


def _recurrent() -> None:
    for names in ((), ("lstm", "attention")):
        twin = Twin(lambda: real(Recurrent), shard_children(*names), divide=None, tolerance=1e-9)
        optimisers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (twin.model, twin.oracle)]
        for step in range(3):
            twin.backward(models.weighted_loss, lambda rank, step=step: real_batch(step, rank))
            twin.check()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()


def _sparse() -> None:
    def make() -> nn.Module:
        model = models.Tied(10, tie=False)
        model.embedding.sparse = True
        return model

    twin = Twin(make, shard_children("embedding", "head"))
    twin.oracle.embedding.sparse = False
    twin.train(models.weighted_loss, lambda step, rank: torch.tensor([9 - step, rank, rank, 5]))


def _autocast() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return models.weighted_loss(model, x) + models.weighted_loss(model, x + 1)

    twin = Twin(Stack, shard_blocks())
    twin.train(loss, lambda step, rank: batch(step, rank, 2, WIDTH))


def _compiled(reshard: bool) -> None:
    def make() -> nn.Module:
        return Stack(2)

    def shard(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard_blocks(reshard_after_forward=reshard)(model)

    twin = Twin(make, shard)
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH), steps=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_modules_and_modes(world: int) -> None:
    for body in (_recurrent, _sparse, _autocast):
        run_ranks(body, world, 60)


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_blocks(world: int) -> None:
    for reshard in (True, False):
        run_ranks(_compiled, world, 100, reshard)


def _by_hand() -> None:
    """Units gathered ahead, kept after forward or backward, or let go early: values never change, only gathers."""
    x = lambda rank: batch(1, rank, 2, WIDTH)  # noqa: E731

    def ahead(twin: Twin) -> None:
        handles = [unit.unshard(async_op=True) for unit in (twin.model, *twin.model.blocks)]
        for handle in handles:
            handle.wait()

    def let_go(twin: Twin) -> None:
        for unit in (*twin.model.blocks, twin.model):
            unit.reshard()

    before: list[Callable[[Twin], Any]] = [ahead, let_go, lambda twin: None]
    settings = list(itertools.product((True, False), (True, False)))
    for (forward, backward), prepare in itertools.product(settings, before):
        twin = Twin(Stack, shard_blocks())
        twin.model.set_reshard_after_forward(forward)
        twin.model.set_reshard_after_backward(backward)
        for _ in range(3):
            prepare(twin)
            twin.backward(models.weighted_loss, x)
            let_go(twin)
            twin.check()
            for model in (twin.model, twin.oracle):
                torch.optim.SGD(model.parameters(), 1 / 32).step()
                model.zero_grad()
            twin.check()
        # The optimiser steps on shards while whole copies are still there: nobody may compute with the old ones.
        prepare(twin)
        twin.backward(models.weighted_loss, x)
        for model in (twin.model, twin.oracle):
            params = [u.sharded for unit in twin.units for u in unit.parameters] if model is twin.model else model.parameters()
            torch.optim.SGD(params, 1 / 32).step()
        twin.same("loss", *(models.weighted_loss(m, x(0)).detach() for m in (twin.model, twin.oracle)))


def _refused() -> None:
    twin = Twin(Stack, shard_blocks())
    x = batch(1, twin.rank, 2, WIDTH)
    loss = models.weighted_loss(twin.model, x.requires_grad_())
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss = models.weighted_loss(twin.model, x)
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
    with pytest.raises(UsageError, match="changed between this forward and its backward"):
        loss.backward()
    twin.model.zero_grad()
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_units_held_by_hand_and_what_is_refused(world: int) -> None:
    run_ranks(_by_hand, world, 60)
    run_ranks(_refused, world, 60)


def _no_inputs_need_gradients() -> None:
    """Inputs that need no gradient, an output that needs none, a loss from the middle, a unit that changes nothing."""
    twin = Twin(Stack, shard_blocks(reshard_after_forward=True))

    def from_the_middle(model: Any, x: torch.Tensor) -> torch.Tensor:
        seen = []
        handle = model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(out))
        model(x)
        handle.remove()
        return seen[0].sum()

    for step, loss in enumerate((from_the_middle, models.weighted_loss, from_the_middle)):
        twin.model.zero_grad()
        twin.oracle.zero_grad()
        twin.backward(loss, lambda rank, step=step: batch(step, rank, 2, WIDTH))
        twin.check()
    twin = Twin(lambda: nn.Sequential(nn.Identity(), models.Block().requires_grad_(False)), shard_root())
    assert not twin.model(batch(0, 0, 2, WIDTH)).requires_grad
    x = batch(0, 0, 2, WIDTH).requires_grad_()
    twin.model(x).sum().backward()
    y = x.detach().requires_grad_()
    twin.oracle(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    twin.check_rest()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_parts_of_the_graph(world: int) -> None:
    run_ranks(_no_inputs_need_gradients, world, 60)
