"""Mixed precision: the oracle keeps the same master, compute and reduce dtypes, and must agree to the last bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from models_for_tests import WIDTH, Stack, shard_blocks, shard_root
from parity import Twin, norm_of
from raggedfsdp import MixedPrecisionPolicy, fully_shard
from ranks import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class MixedTwin(Twin):
    """The oracle casts its parameters and computes each rank's gradients in that dtype, accumulates them in the reduce dtype,
    and rounds the sum over ranks to the reduce dtype once."""

    def __init__(self, make: Callable[[], nn.Module], shard: Callable[..., Any], policy: MixedPrecisionPolicy, **options: Any):
        super().__init__(make, lambda model: shard(mp_policy=policy)(model), **options)
        self.policy = policy
        for p in self.oracle.parameters():
            p.grad_dtype = None

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(outputs.numel()).remainder(5).sub(2).to(outputs.dtype)
        return (outputs * weights.view_as(outputs)).sum()

    def micro_batches(self, batches: Callable[[int], list[torch.Tensor]], sync: bool) -> None:
        """One gradient of several micro-batches; with `sync` each is reduced, otherwise only the last."""
        for p in self.oracle.parameters():
            if p.requires_grad:
                p.grad = None
        groups = [[i] for i in range(len(batches(0)))] if sync else [list(range(len(batches(0))))]
        for group in groups:
            self._add(group, batches)
        own = batches(self.rank)
        for i, x in enumerate(own):
            self.model.set_requires_gradient_sync(sync or i == len(own) - 1)
            self.loss(self.model(x)).backward()

    def _add(self, group: list[int], batches: Callable[[int], list[torch.Tensor]]) -> None:
        sums: dict[str, torch.Tensor] = {}
        for rank in range(self.world):
            mine: dict[str, torch.Tensor] = {}
            for i in group:
                for name, g in self._gradients(batches(rank)[i]).items():
                    mine[name] = mine[name].add_(g) if name in mine else g.to(self._reduce_dtype(name), copy=True)
            for name, g in mine.items():
                sums[name] = sums[name] + g if name in sums else g.to(torch.promote_types(FP32, g.dtype), copy=True)
        for name, total in sums.items():
            p = self.oracle.get_parameter(name)
            total = total.to(self._reduce_dtype(name))
            total = total.to(torch.promote_types(p.dtype, total.dtype)) * self.factor
            p.grad = total if p.grad is None else p.grad + total

    def _gradients(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        policy = self.policy
        cast = {
            name: p.detach().to(policy.param_dtype or p.dtype).requires_grad_(p.requires_grad)
            for name, p in self.oracle.named_parameters()
        }
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            x = x.to(policy.param_dtype)
        out = functional_call(self.oracle, cast, (x,))
        self.loss(out.to(policy.output_dtype or out.dtype)).backward()
        return {name: p.grad for name, p in cast.items() if p.grad is not None}

    def _reduce_dtype(self, name: str) -> torch.dtype:
        return self.policy.reduce_dtype or self.policy.param_dtype or self.oracle.get_parameter(name).dtype


def real_stack(dtype: torch.dtype = FP32) -> nn.Module:
    model = Stack()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5)
    return model.to(dtype)


def real_batches(step: int, rank: int, dtype: torch.dtype, n: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(2 + i, WIDTH, generator=generator).to(dtype) for i in range(n)]


POLICIES: dict[str, tuple[MixedPrecisionPolicy, torch.dtype, torch.dtype]] = {  # policy, originals, inputs
    "bf16, reduce fp32": (MixedPrecisionPolicy(BF16, FP32), FP32, FP32),
    "bf16, reduce bf16": (MixedPrecisionPolicy(BF16), FP32, FP32),
    "bf16, reduce fp32, output fp32": (MixedPrecisionPolicy(BF16, FP32, FP32), FP32, FP32),
    "bf16, inputs as they are": (MixedPrecisionPolicy(BF16, FP32, None, cast_forward_inputs=False), FP32, BF16),
    "fp32, reduce bf16": (MixedPrecisionPolicy(None, BF16), FP32, FP32),
    "bf16 originals": (MixedPrecisionPolicy(), BF16, BF16),
    "bf16 originals, reduce fp32": (MixedPrecisionPolicy(None, FP32), BF16, BF16),
    "bf16 originals, compute and reduce fp32": (MixedPrecisionPolicy(FP32, FP32), BF16, BF16),
    "fp16": (MixedPrecisionPolicy(FP16, FP16), FP32, FP32),
}


def _policy(name: str) -> None:
    policy, originals, inputs = POLICIES[name]
    reduce_dtype = policy.reduce_dtype or policy.param_dtype or originals
    # Halving before an fp16 sum, so that it does not overflow, may round the smallest numbers.
    tolerance = 2e-3 if reduce_dtype == FP16 else 0.0
    for sync, divide in itertools.product((True, False), (1.0, None)):
        if sync and divide is None and dist.get_world_size() == 3:
            continue  # scaling by a third and adding round in one operation or in two
        shard = lambda mp_policy: shard_blocks(mp_policy=mp_policy)  # noqa: E731
        twin = MixedTwin(lambda: real_stack(originals), shard, policy, divide=divide, tolerance=tolerance)
        optimisers = [torch.optim.SGD(m.parameters(), 1 / 64) for m in (twin.model, twin.oracle)]
        for step in range(2):
            twin.micro_batches(lambda rank, step=step: real_batches(step, rank, inputs), sync)
            twin.check()
            assert all(p.grad.dtype == torch.promote_types(originals, reduce_dtype) for p in twin.model.parameters())
            with torch.no_grad():
                x = real_batches(9, 0, inputs)[0]
                assert twin.model(x).dtype == (policy.output_dtype or policy.param_dtype or originals)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            twin.check()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_policies(world: int) -> None:
    for name in POLICIES:
        run_ranks(_policy, world, 60, name)


class MixedDtypes(nn.Module):
    """A bf16 linear and an fp32 norm in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=BF16)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x.float()).to(BF16))


def _mixed_dtypes() -> None:
    for reduce_dtype in (FP32, None):

        def make() -> nn.Module:
            return MixedDtypes().requires_grad_(False)

        twin = MixedTwin(make, lambda mp_policy: shard_root(mp_policy=mp_policy), MixedPrecisionPolicy(None, reduce_dtype))
        buckets = twin.units[0].core.buckets
        assert {b.shard_dtype for b in buckets} == {BF16, FP32}
        assert all(b.reduce_dtype == (reduce_dtype or b.shard_dtype) for b in buckets)
        x = real_batches(0, twin.rank, FP32)[0]
        assert torch.equal(twin.model(x), twin.oracle(x))
        for step, names in enumerate([("linear", "norm"), ("norm",), ("linear",)]):
            for model in (twin.model, twin.oracle):
                model.requires_grad_(False)
                model.zero_grad()
                for name in names:
                    getattr(model, name).requires_grad_(True)
            twin.micro_batches(lambda rank, step=step: real_batches(step, rank, FP32), sync=step % 2 == 0)
            twin.check()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_dtypes_in_one_unit(world: int) -> None:
    run_ranks(_mixed_dtypes, world, 60)


class Scalar(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def _cancellation() -> None:
    """Micro-batch gradients 256, 1 and -256 are 1 together, though bf16 has no 257."""
    for (param, originals), sync in itertools.product(((BF16, FP32), (None, BF16)), (True, False)):
        model = Scalar(originals)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param, FP32))
        for micro, value in enumerate((256.0, 1.0, -256.0)):
            model.set_requires_gradient_sync(sync or micro == 2)
            model(torch.full((3,), value, dtype=BF16)).backward()
        assert model.w.grad.dtype == FP32
        assert model.w.grad.full_tensor().tolist() == pytest.approx([1.0] * 3, rel=1e-4)  # a third is not exact


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_small_gradients_survive_large_ones(world: int) -> None:
    run_ranks(_cancellation, world, 60)


class Ones(nn.Module):
    """Twelve elements with gradient 1, one of them alone on its rank, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.zeros(11))
        self.unused = nn.Parameter(torch.zeros(2))
        self.one = nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        return self.many.sum() + self.one


def spoil_padding(model: Any) -> None:
    """NaN wherever a shard or gradient shard holds no parameter."""
    rank = dist.get_rank()
    for bucket in model._ragged_unit.core.buckets:
        plan = bucket.plan
        padding = torch.ones(plan.shard_numel, dtype=torch.bool)
        for i in range(bucket.size):
            owned = plan.owned(i, rank)
            begin = plan.offsets[i] + owned.begin - rank * plan.shard_numel
            padding[begin : begin + owned.numel()] = False
        gradient = torch.empty(0).set_(bucket.gradient_view(0).untyped_storage(), 0, (plan.shard_numel,))
        for flat in (bucket.shard(), gradient):
            flat[padding] = math.nan


def _norms() -> None:
    for p, foreach in itertools.product((1.0, 2.0, 3.0, math.inf), (True, False, None)):
        model: Any = Ones()
        fully_shard(model)
        optimiser = torch.optim.AdamW(model.parameters(), 0.5)
        for _ in range(2):
            model().backward()
            spoil_padding(model)
            assert model.unused.grad is None
            want = norm_of([torch.ones(12)], p)
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), want / 2, norm_type=p, foreach=foreach)
            total = total.full_tensor() if hasattr(total, "full_tensor") else total
            assert total.item() == pytest.approx(want, rel=1e-6)
            assert model.many.grad.full_tensor().tolist() == pytest.approx([0.5] * 11, rel=1e-5)
            optimiser.step()
            optimiser.zero_grad()
        assert model.many.full_tensor().unique().numel() == 1
        assert not model.one.full_tensor().isnan()
        assert model.unused.full_tensor().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_norms(world: int) -> None:
    run_ranks(_norms, world, 60)
