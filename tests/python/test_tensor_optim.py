"""torch's optimisers on ragged parameters do, bit for bit, what they do on whole ones."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from raggedfsdp.tensor import RaggedDTensor
from ranks import run_ranks
from tensor_cases import ragged

SHAPES = [(), (0, 4), (1, 17), (5, 3), (7,), (2, 3, 5)]
MODES: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class Lion(optim.Optimizer):
    """An element-wise optimiser that torch does not have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                update = moment.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"])
                moment.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMISERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **k: optim.SGD(p, lr=0.1, **k),
    "sgd_nesterov": lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    "adam": lambda p, **k: optim.Adam(p, lr=0.1, amsgrad=True, **k),
    "adamw": lambda p, **k: optim.AdamW(p, lr=0.1, **k),
    "adamw_tensor_lr": lambda p, **k: optim.AdamW(p, lr=torch.tensor(0.1), **k),
    "adagrad": lambda p, **k: optim.Adagrad(p, lr=0.1, **k),
    "rmsprop": lambda p, **k: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **k),
    "nadam": lambda p, **k: optim.NAdam(p, lr=0.1, **k),
    "radam": lambda p, **k: optim.RAdam(p, lr=0.1, **k),
    "adamax": lambda p, **k: optim.Adamax(p, lr=0.1, **k),
    "adadelta": lambda p, **k: optim.Adadelta(p, lr=0.1, **k),
    "asgd": lambda p, **k: optim.ASGD(p, lr=0.1, **k),
    "rprop": lambda p, **k: optim.Rprop([q for q in p if q.dim() > 0], lr=0.1, **k),  # it indexes, which needs a dim
    "lion": lambda p, **k: Lion(p, lr=0.1),  # has no modes
}
NO_FOREACH = {"adamw_tensor_lr", "lion"}
FUSED = {"sgd", "sgd_nesterov", "adam", "adamw", "adamw_tensor_lr", "adagrad"}


def _gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def _pairs() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    whole = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(99))) for shape in SHAPES]
    return whole, [nn.Parameter(ragged(p.detach())) for p in whole]


def _train(whole: list[nn.Parameter], cut: list[nn.Parameter], optimisers: list[optim.Optimizer], steps: range) -> None:
    for step in steps:
        for w, c in zip(whole, cut, strict=True):
            w.grad = _gradient(w.shape, step)
            c.grad = ragged(w.grad)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=step % 2 == 0)


def _assert_equal(whole: list[nn.Parameter], cut: list[nn.Parameter]) -> None:
    for w, c in zip(whole, cut, strict=True):
        full = c.full_tensor()
        assert full.shape == w.shape
        assert torch.equal(full, w), (w.shape, (full - w).abs().max())


def _equals_the_unsharded(names: list[str]) -> None:
    for name in names:
        for mode in MODES:
            if ("fused" in mode and name not in FUSED) or ("foreach" in mode and mode["foreach"] and name in NO_FOREACH):
                continue
            whole, cut = _pairs()
            make = OPTIMISERS[name]
            _train(whole, cut, [make(whole, **mode), make(cut, **mode)], range(4))
            if "fused" in mode:  # the vectorised kernel and its scalar tail may differ in the last bit
                for w, c in zip(whole, cut, strict=True):
                    torch.testing.assert_close(c.full_tensor(), w.detach(), rtol=1e-6, atol=1e-6)
            else:
                _assert_equal(whole, cut)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_the_unsharded(world: int) -> None:
    run_ranks(_equals_the_unsharded, world, 120, list(OPTIMISERS))


def _resumes() -> None:
    """State goes through deepcopy and a file, and training goes on as if nothing had happened (G4 for the 0-d one)."""
    whole, cut = _pairs()
    reference, ours = (optim.AdamW(p, lr=0.1) for p in (whole, cut))
    _train(whole, cut, [reference, ours], range(2))
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in cut], "optimiser": copy.deepcopy(ours.state_dict())}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(p) for p in saved["model"]]
    again = optim.AdamW(resumed, lr=0.3)
    again.load_state_dict(saved["optimiser"])
    moments = [s[k] for s in again.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(m, RaggedDTensor) for m in moments)
    _train(whole, resumed, [reference, again], range(2, 4))
    _assert_equal(whole, resumed)
    assert [p.shape for p in resumed] == [torch.Size(s) for s in SHAPES]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_saved_state_resumes(world: int) -> None:
    run_ranks(_resumes, world)


def _schedules() -> None:
    whole, cut = _pairs()
    optimisers = [optim.AdamW(p, lr=torch.tensor(0.1)) for p in (whole, cut)]
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in optimisers]
    for step in range(3):
        _train(whole, cut, optimisers, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    _assert_equal(whole, cut)


def test_schedulers_with_a_tensor_learning_rate() -> None:
    run_ranks(_schedules, 2)


def _scales(bad_rank: int) -> list[bool]:
    """One rank's infinity makes every rank skip the step."""
    cut = _pairs()[1]
    before = [p.detach().clone() for p in cut]
    optimiser = optim.SGD(cut, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes the scale tensor
    for p in cut:
        p.grad = ragged(torch.full(p.shape, 4.0))
    if dist.get_rank() == bad_rank:
        largest = max(cut, key=lambda p: p.to_local().numel())
        largest.grad.to_local()[0] = torch.inf
    scaler.step(optimiser)
    scaler.update()
    kept = all(torch.equal(p.detach().to_local(), b.to_local()) for p, b in zip(cut, before, strict=True))
    moved = all(torch.equal(p.detach().to_local(), b.to_local() - 1) for p, b in zip(cut, before, strict=True))
    return [kept, moved, scaler.get_scale() == 2.0]


def test_found_inf_is_agreed() -> None:
    assert run_ranks(_scales, 3, 60, 1) == [[True, False, True]] * 3
    assert run_ranks(_scales, 3, 60, -1) == [[False, True, False]] * 3
    assert run_ranks(_scales, 1, 60, 0) == [[True, False, True]]


def test_foreach_lists_know_the_class() -> None:
    from torch.optim.optimizer import _foreach_supported_types as optim_types
    from torch.utils._foreach_utils import _foreach_supported_types as util_types

    assert optim_types.count(RaggedDTensor) == util_types.count(RaggedDTensor) == 1
