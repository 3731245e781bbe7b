"""What FSDP2's own tests ask of mixed precision: who casts what, also in a recompute, in norms, and after conversions."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models_for_tests import WIDTH
from raggedfsdp import MixedPrecisionPolicy, fully_shard
from raggedfsdp._state import units_in
from ranks import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Recording(nn.Module):
    """Remembers the dtypes that came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(x.dtype)
        if beside is not None:
            self.seen.append(beside.dtype)
        return self.linear(x)


class Two(nn.Module):
    def __init__(self, casts_itself: bool = False, with_outside: bool = False) -> None:
        super().__init__()
        self.first, self.second = Recording(), Recording()
        self.casts_itself, self.with_outside = casts_itself, with_outside
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        y = self.first(x)
        outside = torch.ones(2, WIDTH) if self.with_outside else None
        if not self.casts_itself:
            return self.second(y, outside)
        self.second.seen.append(y.dtype)
        return self.second.linear(y.to(self.second.linear.weight.dtype))


def _one_submodule() -> None:
    x = torch.zeros(2, WIDTH)
    cases: list[tuple[str, MixedPrecisionPolicy, tuple[torch.dtype, ...]]] = [
        ("second", MixedPrecisionPolicy(FP16), (FP32, FP32, FP16)),
        ("first", MixedPrecisionPolicy(FP16, output_dtype=FP32), (FP32, FP16, FP32)),
        ("first", MixedPrecisionPolicy(FP16, output_dtype=BF16), (FP32, FP16, BF16)),
    ]
    for name, policy, want in cases:
        model: Any = Two()
        if want[2] == BF16:
            model.second.to(BF16)
        fully_shard(model.get_submodule(name), mp_policy=policy)
        fully_shard(model)
        model(x).sum().backward()
        assert (model.seen[0], model.first.seen[0], model.second.seen[0]) == want
    own: Any = Two(casts_itself=True)
    fully_shard(own.second.linear, mp_policy=MixedPrecisionPolicy(FP16, cast_forward_inputs=False))
    fully_shard(own)
    with pytest.raises(RuntimeError, match="dtype"):
        own(x)  # outside its forward the parameter shows the master's dtype, so this module casts to that


def _outside_inputs() -> None:
    """A tensor made in a parent's forward is cast by the unit that takes it, unless told not to."""
    for casts in (True, False):
        model: Any = Two(with_outside=True)
        fully_shard(model.second, mp_policy=MixedPrecisionPolicy(FP16, cast_forward_inputs=casts))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(FP16))
        model(torch.zeros(2, WIDTH)).sum().backward()
        assert model.seen == [FP16]
        assert model.second.seen == [FP16, FP16 if casts else FP32]


class Recomputed(nn.Module):
    def __init__(self, dtype: torch.dtype, reentrant: bool) -> None:
        super().__init__()
        self.inner = Recording()
        self.dtype, self.reentrant = dtype, reentrant
        self.outputs: list[torch.dtype] = []

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.outputs.append(y.dtype)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype).requires_grad_()
        if self.reentrant:
            return checkpoint(self.run, x, use_reentrant=True).float().sum()
        return checkpoint(self.run, x, use_reentrant=False, early_stop=False).float().sum()


def _recomputed() -> None:
    """A recompute casts inputs and outputs as the first run did."""
    cast_inputs = MixedPrecisionPolicy(BF16, BF16)
    cast_outputs = MixedPrecisionPolicy(BF16, BF16, FP32, cast_forward_inputs=False)
    for (policy, dtype), reentrant in itertools.product(((cast_inputs, FP32), (cast_outputs, BF16)), (True, False)):
        model: Any = Recomputed(dtype, reentrant)
        fully_shard(model.inner, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model(torch.randn(3, WIDTH)).backward()
        assert model.inner.seen == [BF16] * 2
        assert model.outputs == [policy.output_dtype or BF16] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_who_casts_what(world: int) -> None:
    for body in (_one_submodule, _outside_inputs, _recomputed):
        run_ranks(body, world, 60)


# --- norms ---


def _norms(dtype: torch.dtype) -> None:
    """A batch norm's statistics are buffers, which no policy casts: either its weights stay wide, or they become narrow."""
    narrow, wide_weights = MixedPrecisionPolicy(dtype), MixedPrecisionPolicy(output_dtype=dtype)

    def run(model: Any, x: torch.Tensor, norm_policy: MixedPrecisionPolicy) -> None:
        oracle = copy.deepcopy(model)
        for m, policy in zip((*model, model), (narrow, norm_policy, narrow, narrow), strict=True):
            fully_shard(m, mp_policy=policy)
        if norm_policy is narrow and isinstance(model[1], nn.modules.batchnorm._BatchNorm):
            model[1].running_mean, model[1].running_var = (b.to(dtype) for b in (model[1].running_mean, model[1].running_var))
        for _ in range(2):
            y = model(x)
            assert y.dtype == dtype
            y.sum().backward()
            oracle(x)
        assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.parameters())
        for (name, b), c in zip(model.named_buffers(), oracle.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=0.05, atol=0.05, msg=name, check_dtype=False)

    torch.manual_seed(0)
    rows, images = torch.randn(4, 8), torch.randn(3, 1, 9, 9)
    for policy in (narrow, wide_weights):
        run(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), rows, policy)
        run(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), rows, policy)
        run(nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)), images, policy)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norms(dtype: torch.dtype) -> None:
    run_ranks(_norms, 2, 60, dtype)


# --- dtypes of reductions, after conversions and for frozen parameters ---


class WithWholeNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.whole = nn.Parameter(torch.ones(WIDTH, dtype=torch.int64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def reduced_in(model: nn.Module) -> set[torch.dtype]:
    """The dtypes of what was reduced."""
    return {b.reduce_dtype for u in units_in(model) for b in u.core.buckets if b.reductions > 0}


def _reductions() -> None:
    model: Any = WithWholeNumbers()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    model.layers.requires_grad_(True)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert reduced_in(model) == {FP32}
    assert all(p.grad.dtype == FP32 for p in model.layers.parameters())
    assert model.whole.grad is None
    # What was asked for stays when the masters change: neither is clamped to the other.
    for asked in (BF16, FP32, None):
        narrow: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=BF16) for _ in range(2)))
        policy = MixedPrecisionPolicy(BF16, asked)
        for m in (*narrow, narrow):
            fully_shard(m, mp_policy=policy)
        narrow.to(FP32)
        assert {p.dtype for p in narrow.parameters()} == {FP32}
        narrow(torch.randn(4, WIDTH)).sum().backward()
        assert reduced_in(narrow) == {asked or BF16}
        assert {p.grad.dtype for p in narrow.parameters()} == {FP32}


@pytest.mark.parametrize("world", [1, 2])
def test_dtypes_of_reductions(world: int) -> None:
    run_ranks(_reductions, world, 60)
