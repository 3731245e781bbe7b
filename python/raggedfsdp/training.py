"""The training loop of one rank: an ordinary FSDP2 loop."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from raggedfsdp import FSDPModule, Granularity, MixedPrecisionPolicy, UsageError, fully_shard
from raggedfsdp.data import Corpus, Draw, open_corpus
from raggedfsdp.models import load_config, units
from raggedfsdp.recipe import Place, TrainOptions, build_seeded, check_config, clip, make_optimizer, next_token_loss
from raggedfsdp.report import StepReport, TrainReport, memory_report, unit_reports
from raggedfsdp.verify import Oracle, gathered_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def train(options: TrainOptions, place: Place, on_step: Callable[[StepReport], None]) -> TrainReport:
    """Trains on every rank of the default process group. Each rank returns its own report, with `verify` on rank 0 only."""
    config = load_config(options.model)
    check_config(config, options)
    corpus = open_corpus(options.data)
    model = build_seeded(config, options, place.device)
    parameters = sum(p.numel() for p in model.parameters())
    oracle = _make_oracle(config, options, place)
    shard(model, options, place)
    optimizer = make_optimizer(model, options)
    torch.manual_seed(options.seed + place.rank)  # each rank drops other activations
    steps: list[StepReport] = []
    for step in range(1, options.steps + 1):
        report = _train_step(model, optimizer, corpus, options, place, step)
        if options.verify:
            _verify_step(model, oracle, corpus, report)
        steps.append(report)
        on_step(report)
        _require_finite(report, options)
    return TrainReport(
        model=options.model,
        parameters=parameters,
        ranks=place.ranks,
        precision=options.precision,
        steps=tuple(steps),
        tokens_per_s=tokens_per_s(steps),
        units=tuple(unit_reports(model)),
        memory=memory_report(model),
        verify=oracle.report() if oracle is not None else None,
    )


def shard(model: nn.Module, options: TrainOptions, place: Place) -> None:
    mesh = init_device_mesh(place.device.type, (place.ranks,))
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for _, module in units(model):
        # The root is last in forward and first in backward: releasing it between the two would only cost a gather.
        reshard = options.reshard_after_forward and module is not model
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            orig_param_policy=None if options.rows is None else functools.partial(_rows, options.rows),
            max_buckets=options.max_buckets,
        )


def _rows(count: int, name: str, shape: torch.Size) -> Granularity:
    return Granularity.rows(count) if len(shape) > 1 else Granularity.elements()


def tokens_per_s(steps: list[StepReport]) -> float:
    """Without the first step, which also allocates, unless it is the only one."""
    counted = steps[1:] or steps
    return sum(s.tokens for s in counted) / max(sum(s.seconds for s in counted), 1e-9)


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, options: TrainOptions, place: Place, step: int
) -> StepReport:
    started = time.perf_counter()
    total = torch.zeros((), device=place.device)
    for i in range(options.accumulate):
        cast(FSDPModule, model).set_requires_gradient_sync(i == options.accumulate - 1)
        tokens = corpus.batch(Draw(options.seed, step, i, place.rank), options.batch, options.sequence)
        loss = next_token_loss(model, tokens.to(place.device)) / options.accumulate
        loss.backward()
        total += loss.detach()
    norm = clip(model, options)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    loss_mean = total.item() / place.ranks
    tokens_of_all = options.accumulate * options.batch * options.sequence * place.ranks
    return StepReport(step, loss_mean, norm, tokens_of_all, time.perf_counter() - started)


def _make_oracle(config: PretrainedConfig, options: TrainOptions, place: Place) -> Oracle | None:
    if not options.verify or place.rank != 0:
        return None
    return Oracle(build_seeded(config, options, place.device), options, place)


def _verify_step(model: nn.Module, oracle: Oracle | None, corpus: Corpus, report: StepReport) -> None:
    gathered = gathered_parameters(model)
    if oracle is None:
        deque(gathered, maxlen=0)  # takes part in the gathers
    else:
        oracle.step(corpus, report, gathered)


def _require_finite(report: StepReport, options: TrainOptions) -> None:
    # The loss is the mean over all ranks, so every rank stops here or none does.
    if not math.isfinite(report.loss):
        raise UsageError(f"the loss is {report.loss} at step {report.step}; try a smaller --lr than {options.learning_rate:g}")
