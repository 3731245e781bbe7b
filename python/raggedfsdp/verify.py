"""The unsharded run beside the sharded one: one process, each rank's batches in turn with gradients added.

In turn, not as one large batch: every matrix product then has the shape it has on the ranks, so a step can differ only by
the order in which the ranks' gradients were added. After each step the differences are noted and the unsharded run takes
over the ranks' parameters, because training amplifies even a last bit (a router picks another expert, Adam follows a sign)
and two correct runs of a hundred steps need not look alike. Optimiser state is never taken over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from raggedfsdp.data import Corpus, Draw
from raggedfsdp.models import units
from raggedfsdp.recipe import Place, TrainOptions, clip, make_optimizer, next_token_loss
from raggedfsdp.report import ParameterDifference, StepReport, VerifyReport

# The same for fp32 and bf16: the unsharded run rounds to bf16 where the ranks do.
LOSS_TOLERANCE = 1e-5
GRADIENT_NORM_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-3
_FP32_EPSILON = 2.0**-23  # one rounding of a parameter is no difference, however little a step changed it


class Oracle:
    """Holds the fp32 master; with bf16, forward and backward run on bf16 copies of its parameters."""

    def __init__(self, model: nn.Module, options: TrainOptions, place: Place) -> None:
        self._model = model
        self._options = options
        self._place = place
        self._optimizer = make_optimizer(model, options)
        self._compute_dtype = torch.bfloat16 if options.precision == "bf16" else None
        if self._compute_dtype is not None:
            _cast_inputs(model, self._compute_dtype)
        self._loss = 0.0
        self._gradient_norm = 0.0
        self._parameters = {name: ParameterDifference(name, 0.0, 0.0) for name, _ in model.named_parameters()}

    def step(self, corpus: Corpus, sharded: StepReport, gathered: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Repeats the step that the ranks just made, then compares with what they have now and takes it over."""
        before = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        loss, norm = self._repeat(corpus, sharded.step)
        self._loss = _worst(self._loss, _relative(sharded.loss - loss, loss))
        self._gradient_norm = _worst(self._gradient_norm, _relative(sharded.gradient_norm - norm, norm))
        mine = dict(self._model.named_parameters())
        for name, theirs in gathered:
            p = mine[name].detach()
            self._parameters[name] = _further(self._parameters[name], theirs, p, before[name])
            p.copy_(theirs)

    def report(self) -> VerifyReport:
        return VerifyReport(
            loss=self._loss,
            gradient_norm=self._gradient_norm,
            parameter=_worst(*(d.relative for d in self._parameters.values())),
            loss_tolerance=LOSS_TOLERANCE,
            gradient_norm_tolerance=GRADIENT_NORM_TOLERANCE,
            parameter_tolerance=PARAMETER_TOLERANCE,
            parameters=tuple(self._parameters.values()),
        )

    def _repeat(self, corpus: Corpus, step: int) -> tuple[float, float]:
        options, total = self._options, 0.0
        for rank in range(self._place.ranks):
            for i in range(options.accumulate):
                tokens = corpus.batch(Draw(options.seed, step, i, rank), options.batch, options.sequence)
                total += self._add_gradients(tokens.to(self._place.device))
        for p in self._model.parameters():
            if p.grad is not None:
                p.grad /= self._place.ranks
        norm = clip(self._model, options)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / self._place.ranks, norm

    def _add_gradients(self, tokens: torch.Tensor) -> float:
        if self._compute_dtype is None:
            return self._backward(tokens)
        parameters = list(self._model.parameters())
        masters = [(p.data, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None
            p.data = p.data.to(self._compute_dtype)
        loss = self._backward(tokens)
        for p, (data, total) in zip(parameters, masters, strict=True):
            new = None if p.grad is None else p.grad.float()
            p.grad = None  # a gradient must have its parameter's dtype, so it goes before the master returns
            p.data = data
            p.grad = total if new is None else new if total is None else total.add_(new)
        return loss

    def _backward(self, tokens: torch.Tensor) -> float:
        loss = next_token_loss(self._model, tokens) / self._options.accumulate
        loss.backward()
        return loss.item()


def gathered_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective: every rank must run through all of it. One parameter at a time is whole."""
    for name, p in model.named_parameters():
        yield name, (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def _cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Mixed precision casts the floating-point inputs of every unit; so must the unsharded run."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for _, module in units(model):
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _further(so_far: ParameterDifference, theirs: torch.Tensor, p: torch.Tensor, before: torch.Tensor) -> ParameterDifference:
    difference = theirs - p
    largest = difference.abs().max().item() if difference.numel() else 0.0
    beyond_rounding = _norm(difference) - _FP32_EPSILON * _norm(p)
    relative = _relative(beyond_rounding if not beyond_rounding <= 0 else 0.0, _norm(p - before))
    return ParameterDifference(so_far.parameter, _worst(so_far.largest, largest), _worst(so_far.relative, relative))


def _norm(values: torch.Tensor) -> float:
    return torch.linalg.vector_norm(values).item()


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return abs(difference) / abs(scale) if scale != 0 else math.inf


def _worst(*values: float) -> float:
    """The largest, or NaN if any is NaN: `max` would lose it."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)
