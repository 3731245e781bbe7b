"""GradScaler: one bad number, wherever it lies, and every rank skips the step and lowers the scale alike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks, shard_root
from modes import spoil_padding
from parity import Twin, batch
from raggedfsdp import MixedPrecisionPolicy
from ranks import run_ranks

SCALE = 8.0  # small: fp16 gradients must not overflow by themselves
BAD = (math.inf, -math.inf, math.nan)

Decision = tuple[float, bool]  # the next scale, and whether parameters changed


class Scaled:
    """A model, its optimiser and its scaler."""

    def __init__(self, twin: Twin, lr: float = 1 / 32) -> None:
        self.twin = twin
        self.optimiser = torch.optim.SGD(twin.model.parameters(), lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)

    def backward(self, step: int) -> None:
        x = batch(step, self.twin.rank, 2, WIDTH)
        self.scaler.scale(models.weighted_loss(self.twin.model, x)).backward()

    def step(self) -> Decision:
        before = [p._local_tensor.clone() for p in self.twin.model.parameters()]
        self.scaler.step(self.optimiser)
        self.scaler.update()
        decision = self.scaler.get_scale(), self.changed(before)
        self.scaler.update(SCALE)
        self.optimiser.zero_grad()
        with torch.no_grad():
            for p, old in zip(self.twin.model.parameters(), before, strict=True):
                p._local_tensor.copy_(old)
        return decision

    def changed(self, before: list[torch.Tensor]) -> bool:
        """On any rank: a rank may own little."""
        here = any(not torch.equal(p._local_tensor, old) for p, old in zip(self.twin.model.parameters(), before, strict=True))
        everywhere = torch.tensor(float(here))
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        return bool(everywhere)


def _everywhere(world: int) -> list[tuple[Decision, bool]]:
    """Each decision, with whether a number was bad."""
    scaled = Scaled(Twin(lambda: Stack(1), shard_blocks()))
    parameters = list(scaled.twin.model.parameters())
    decisions = []
    for rank, index, end, value in itertools.product(range(world), range(len(parameters)), (0, -1), BAD):
        scaled.backward(0)
        local = parameters[index].grad._local_tensor
        spoilt = torch.zeros(())
        if rank == dist.get_rank() and local.numel() > 0:
            local[end] = value
            spoilt += 1
        dist.all_reduce(spoilt)
        decisions.append((scaled.step(), bool(spoilt)))
    scaled.backward(0)
    decisions.append((scaled.step(), False))
    return decisions


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_decide_alike(world: int) -> None:
    first, *others = run_ranks(_everywhere, world, 100, world)
    assert all(other == first for other in others)
    for (scale, changed), bad in first:
        assert scale == (SCALE / 2 if bad else SCALE)
        assert changed is not bad
    assert {bad for _, bad in first} == {True, False}


def _padding() -> None:
    """What lies between tensors is no gradient."""
    padded = Twin(lambda: models.Shapes(((1, 17), (5, 3), (7,))), shard_root())
    optimiser = torch.optim.SGD(padded.model.parameters(), 1 / 32)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    for step in range(2):
        scaler.scale(models.sum_loss(padded.model, batch(step, padded.rank, 3))).backward()
        assert spoil_padding(padded, math.nan) > 0, "nothing was spoilt"
        for rank in range(padded.world):
            models.sum_loss(padded.oracle, batch(step, rank, 3)).backward()
        scaler.unscale_(optimiser)
        padded.check()
        scaler.step(optimiser)
        scaler.update()
        assert scaler.get_scale() == SCALE
        reference = torch.optim.SGD(padded.oracle.parameters(), 1 / 32)
        reference.step()
        optimiser.zero_grad()
        reference.zero_grad()
        padded.check()


def _overflow_in_compute(policy: MixedPrecisionPolicy) -> list[Decision]:
    """One rank's input overflows; its gradients reach the others in the reduction."""
    twin = Twin(Stack, shard_blocks(mp_policy=policy))
    scaled = Scaled(twin)
    decisions = []
    for bad_rank in [None, *range(twin.world)]:
        x = batch(1, twin.rank, 2, WIDTH)
        if bad_rank == twin.rank:
            x[0, 0] = math.nan
        scaled.scaler.scale(twin.model(x).sum().float()).backward()
        decisions.append(scaled.step())
    return decisions


@pytest.mark.parametrize("world", [1, 3])
def test_padding_and_bad_inputs(world: int) -> None:
    run_ranks(_padding, 4 if world == 1 else world, 60)
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(torch.float16, torch.float32),
        MixedPrecisionPolicy(torch.float16),
    ):
        first, *others = run_ranks(_overflow_in_compute, world, 60, policy)
        assert all(other == first for other in others)
        assert first == [(SCALE, True)] + [(SCALE / 2, False)] * world


def _parity() -> None:
    """Scaled, unscaled, clipped and stepped as users do: the oracle's run without a scale. A power of two is exact."""
    twin = Twin(Stack, shard_blocks(), tolerance=1e-5)
    both = (twin.model, twin.oracle)
    optimisers = [torch.optim.AdamW(m.parameters(), 0.01) for m in both]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    for step in range(6):
        for micro in range(2):
            twin.model.set_requires_gradient_sync(micro == 1)
            for rank in range(twin.world):
                models.weighted_loss(twin.oracle, batch(2 * step + micro, rank, 2, WIDTH)).backward()
            loss: Any = models.weighted_loss(twin.model, batch(2 * step + micro, twin.rank, 2, WIDTH))
            scaler.scale(loss).backward()
        scaler.unscale_(optimisers[0])
        twin.check()
        for model in both:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimisers[0])
        scaler.update()
        optimisers[1].step()
        for model in both:
            model.zero_grad()
        twin.check()
    assert scaler.get_scale() == SCALE * 2**3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scaled_training_equals_unscaled(world: int) -> None:
    run_ranks(_parity, world, 60)
