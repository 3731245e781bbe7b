"""torch's optimisers, clipping and schedulers on sharded parameters, in fp64 so that only real errors are visible."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Stack, Tied, shard_blocks, shard_children, shard_root
from parity import Twin
from raggedfsdp import fully_shard
from ranks import run_ranks

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
}
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=6, cycle_momentum=False),
]


def real(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5)
    return model


def real_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step * 100 + rank), dtype=torch.double)


def _optimiser(name: str) -> None:
    for schedule, clip in zip(SCHEDULERS, (None, 1.0, 1e-3), strict=True):
        twin = Twin(lambda: real(Stack), shard_blocks(), divide=None, tolerance=1e-10)
        both = (twin.model, twin.oracle)
        optimisers = [OPTIMISERS[name](m.parameters()) for m in both]
        schedulers = [schedule(o) for o in optimisers]
        for step in range(5):
            twin.backward(models.weighted_loss, lambda rank, step=step: real_batch(step, rank))
            if clip is not None:
                norms = [nn.utils.clip_grad_norm_(m.parameters(), clip) for m in both]
                torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-10, atol=0)
            for optimiser, scheduler in zip(optimisers, schedulers, strict=True):
                optimiser.step()
                scheduler.step()
                optimiser.zero_grad(set_to_none=step % 2 == 0)
            twin.check()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_optimisers_schedulers_and_clipping(world: int) -> None:
    for name in OPTIMISERS:
        run_ranks(_optimiser, world, 60, name)


def _subset() -> None:
    """Each half of the parameters has its own optimiser, stepped and zeroed at its own pace."""
    twin = Twin(lambda: real(lambda: Tied(6, WIDTH)), shard_children("embedding", "body"), divide=None, tolerance=1e-10)
    names = ["embedding.weight"], ["body.weight"]
    optimisers = [
        [torch.optim.AdamW([m.get_parameter(n) for n in group], 0.1) for m in (twin.model, twin.oracle)] for group in names
    ]
    for step in range(6):
        twin.backward(models.weighted_loss, lambda rank, step=step: (torch.arange(4) + step + rank) % 6)
        twin.check()
        for optimiser in optimisers[step % 2]:
            optimiser.step()
            optimiser.zero_grad()
        twin.check()


@pytest.mark.parametrize("world", [1, 3])
def test_optimisers_of_parts(world: int) -> None:
    run_ranks(_subset, world, 60)


class Temperature(nn.Module):
    """A 0-d parameter beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature.exp()


def _resume(fused: bool) -> None:
    """Train 4 steps = train 2, save, load into a fresh model, train 2."""
    twin = Twin(lambda: real(Temperature), shard_root(), divide=None, tolerance=1e-10)
    make = lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=fused)  # noqa: E731
    optimisers = [make(twin.model), make(twin.oracle)]
    for step in range(4):
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": twin.model.state_dict(), "optimiser": optimisers[0].state_dict()}, file)
            twin.model = real(Temperature)
            with twin.traffic.watch():
                fully_shard(twin.model)
            optimisers[0] = make(twin.model)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            assert saved["model"]["temperature"].shape == ()
            twin.model.load_state_dict(saved["model"])
            optimisers[0].load_state_dict(saved["optimiser"])
            twin.check()
        twin.backward(models.weighted_loss, lambda rank, step=step: real_batch(step, rank))
        for optimiser in optimisers:
            optimiser.step()
        twin.check()
        assert twin.model.temperature.shape == () == twin.model.temperature.grad.shape
        for optimiser in optimisers:
            optimiser.zero_grad()
    state = optimisers[0].state[twin.model.temperature]
    assert state["exp_avg"].shape == ()
    assert twin.model.temperature.full_tensor().shape == ()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_0d_parameter_saved_and_resumed(world: int) -> None:
    for fused in (False, True):
        run_ranks(_resume, world, 60, fused)


def _zero_grad() -> None:
    """Whether gradients are dropped or zeroed changes nothing, nor do `.grad`s that were kept as clones."""
    results = []
    for to_none, root in itertools.product((True, False), (True, False)):
        twin = Twin(lambda: real(Stack), shard_blocks(reshard_after_forward=root), divide=None, tolerance=1e-10)
        optimiser = torch.optim.SGD(twin.model.parameters(), 0.1)
        for step in range(3):
            models.weighted_loss(twin.model, real_batch(step, twin.rank)).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=to_none)
            assert all((p.grad is None) == to_none for p in twin.model.parameters())
            assert to_none or all(not p.grad._local_tensor.any() for p in twin.model.parameters())
        results.append([p._local_tensor.clone() for p in twin.model.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_zero_grad_both_ways(world: int) -> None:
    run_ranks(_zero_grad, world, 60)
