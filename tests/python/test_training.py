"""The training loop beside the unsharded one: equal where the engine is right, and not where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raggedfsdp import training
from raggedfsdp.recipe import Place, TrainOptions
from raggedfsdp.report import TrainReport, VerifyReport
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
OPTIONS = TrainOptions(
    model="llama-tiny",
    data=Path(__file__),
    steps=3,
    batch=1,
    sequence=32,
    learning_rate=1e-3,
    precision="fp32",
    accumulate=1,
    reshard_after_forward=True,
    clip_norm=1.0,
    seed=0,
    verify=True,
)


def train(options: TrainOptions) -> TrainReport:
    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return training.train(options, place, lambda step: None)


def verified(ranks: int, **changes: Any) -> VerifyReport:
    report = run_ranks(train, ranks, 100, replace(OPTIONS, **changes))[0]
    assert report.verify is not None
    return report.verify


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-oss-tiny", "deepseek-tiny"])
def test_presets_equal_the_unsharded_run(model: str, precision: str) -> None:
    verify = verified(3, model=model, precision=precision)
    assert verify.passed, verify
    assert len(verify.parameters) > 30
    assert all(d.relative <= verify.parameter_tolerance for d in verify.parameters)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 3},
        {"reshard_after_forward": False},
        {"clip_norm": 0.0},
        {"clip_norm": 1e-3},
        {"accumulate": 2, "precision": "bf16", "batch": 2},
        {"learning_rate": 1e-7},
    ],
)
def test_options_equal_the_unsharded_run(changes: dict[str, Any]) -> None:
    verify = verified(2, **changes)
    assert verify.passed, verify


@pytest.mark.parametrize("ranks", [1, 4])
def test_worlds_equal_the_unsharded_run(ranks: int) -> None:
    verify = verified(ranks)
    assert verify.passed, verify


def wrong_scale(options: TrainOptions) -> TrainReport:
    right = training.shard

    def shard(model: nn.Module, options: TrainOptions, place: Place) -> None:
        right(model, options, place)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.01 * place.ranks)

    training.shard = shard
    try:
        return train(options)
    finally:
        training.shard = right


def nudge(model: nn.Module) -> None:
    """As if rank 1 lost a little of an update."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(1e-4)


def nudged_before_comparison(options: TrainOptions) -> TrainReport:
    return with_verify_step(options, lambda right, model: (nudge(model), right()))


def nudged_after_comparison(options: TrainOptions) -> TrainReport:
    return with_verify_step(options, lambda right, model: (right(), nudge(model)))


def with_verify_step(options: TrainOptions, change: Callable[[Callable[[], None], nn.Module], object]) -> TrainReport:
    right = training._verify_step

    def verify_step(model: nn.Module, *args: Any) -> None:
        change(lambda: right(model, *args), model)

    training._verify_step = verify_step
    try:
        return train(options)
    finally:
        training._verify_step = right


@pytest.mark.parametrize("fault", [wrong_scale, nudged_before_comparison, nudged_after_comparison])
def test_a_small_fault_is_found(fault: Any) -> None:
    verify = run_ranks(fault, 2, 100, OPTIONS)[0].verify
    assert not verify.passed


def test_a_seed_is_a_training_and_ranks_report_the_same() -> None:
    options = replace(OPTIONS, verify=False, steps=2)
    first, second = run_ranks(train, 2, 100, options), run_ranks(train, 2, 100, options)
    losses = [[s.loss for s in r.steps] for r in (*first, *second)]
    assert losses == [losses[0]] * 4
    other = run_ranks(train, 2, 100, replace(options, seed=1))[0]
    assert [s.loss for s in other.steps] != losses[0]


def test_bytes_of_a_step() -> None:
    released = run_ranks(train, 2, 100, replace(OPTIONS, verify=False))[0]
    kept = run_ranks(train, 2, 100, replace(OPTIONS, verify=False, reshard_after_forward=False))[0]
    twice = run_ranks(train, 2, 100, replace(OPTIONS, verify=False, accumulate=2))[0]
    for unit, unreleased, more in zip(released.units, kept.units, twice.units, strict=True):
        whole = 4 * unit.shard_numel * unit.devices
        gathers = 1 if unit.unit.startswith("root") else 2
        assert unit.gathered_bytes_per_step == gathers * whole
        assert unreleased.gathered_bytes_per_step == whole
        assert more.gathered_bytes_per_step == 2 * gathers * whole
        assert unit.reduced_bytes_per_step == more.reduced_bytes_per_step == whole, "micro-batches are reduced once"
