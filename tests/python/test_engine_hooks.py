"""What users hang into a reduction, and what belongs to one output of a unit only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from models_for_tests import Stack
from parity import Twin, batch, make_integer_
from raggedfsdp import MixedPrecisionPolicy, UsageError, fully_shard, share_comm_ctx
from raggedfsdp.comm import comm_for
from ranks import run_ranks


def sum_loss(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x).sum()


def _reduce_hook(reduce_dtype: torch.dtype | None, accumulate: bool) -> None:
    """Doubles what block 1 reduced; the rest is untouched. Sizes and dtypes are those of the flat shards."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    seen: list[tuple[int, torch.dtype]] = []

    def shard(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    twin = Twin(Stack, shard)

    def double(reduced: torch.Tensor) -> None:
        seen.append((reduced.numel(), reduced.dtype))
        reduced.mul_(2)

    twin.model.blocks[1].set_all_reduce_hook(double)
    for step in range(2 if accumulate else 1):
        before = {n: None if p.grad is None else p.grad.clone() for n, p in twin.oracle.blocks[1].named_parameters()}
        twin.backward(sum_loss, lambda rank, step=step: batch(step, rank, 2, 6))
        for n, p in twin.oracle.blocks[1].named_parameters():
            new = p.grad if before[n] is None else p.grad - before[n]
            p.grad = new * 2 if before[n] is None else before[n] + new * 2
        twin.check()
    plan = twin.model.blocks[1]._ragged_unit.core.buckets[0].plan
    assert set(seen) == {(plan.shard_numel, reduce_dtype or torch.float32)}
    assert len(seen) == (2 if accumulate else 1)


def test_reduce_hook_sees_and_may_change_the_sum() -> None:
    for world in (1, 2, 3):
        run_ranks(_reduce_hook, world, 60, None, False)
    run_ranks(_reduce_hook, 2, 60, None, True)
    run_ranks(_reduce_hook, 2, 60, torch.bfloat16, False)


def _hook_as_a_second_all_reduce() -> None:
    """What the hook is for: a further sum over other ranks. Here over the same ones, each of which has another part."""
    torch.manual_seed(0)
    model: Any = make_integer_(nn.Linear(4, 4, bias=False))
    fully_shard(model)
    comm = comm_for(model._ragged_unit.mesh)
    model.set_gradient_divide_factor(1)
    model.set_all_reduce_hook(lambda reduced: comm.all_reduce(reduced.view(-1)).order_after())
    model(torch.ones(1, 4)).sum().backward()
    # Every element of the sum is W (each rank adds 1); the hook adds up the W ranks' parts, which are all alike.
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), float(dist.get_world_size() ** 2)))


def test_hook_may_communicate() -> None:
    run_ranks(_hook_as_a_second_all_reduce, 2, 60)


class Same(torch.autograd.Function):
    """Autograd gives every Python function zeros where it has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        make_integer_(self)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), Same.apply(self.b(y))


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.two = TwoWays()
        make_integer_(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.two(x, Same.apply(self.before(x)))


def _one_output_only(which: int) -> None:
    def shard(model: Any) -> None:
        fully_shard(model.two)
        fully_shard(model)

    twin = Twin(Behind, shard)
    for step in range(2):
        twin.backward(lambda m, x: m(x)[which].sum(), lambda rank, step=step: batch(step, rank, 2, 4))
        twin.check()
    unused = "two.b.weight" if which == 0 else "two.a.weight"
    assert dict(twin.model.named_parameters())[unused].grad is None


def test_backward_of_one_output_runs_only_what_leads_to_it() -> None:
    for which in (0, 1):
        run_ranks(_one_output_only, 2, 60, which)


def _shared_context() -> None:
    a, b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(b[0])
    fully_shard([a, b])
    c: Any = fully_shard(nn.Linear(2, 2))
    share_comm_ctx([a, b, c])
    contexts = {m._ragged_unit.context for m in (a, b, b[0], c)}
    assert len(contexts) == 1
    assert len(a._ragged_unit.context.units) == 3


def test_a_shared_context_has_every_unit_once() -> None:
    run_ranks(_shared_context, 1, 60)


def _changed_while_gradients_wait() -> None:
    model: Any = fully_shard(nn.Linear(2, 2))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="not reduced yet"):
        model.double()
    model.zero_grad()
    model.double()
    assert model.weight.dtype == torch.float64


def test_a_model_whose_gradients_wait_is_not_converted() -> None:
    run_ranks(_changed_while_gradients_wait, 1, 60)


class Recomputed(nn.Module):
    """The backward of `second` asks for no saved tensor, so it is over when `first` has all three recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight.requires_grad_(False)
        make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def kept(fn: Any, t: torch.Tensor) -> Any:
            return checkpoint(fn, t, use_reentrant=False)

        return kept(lambda t: kept(self.first, t) + kept(self.second, t) + kept(torch.abs, t), x)


def _recomputed_after_its_backward() -> None:
    def shard(model: Any) -> None:
        fully_shard(model.first)
        fully_shard(model.second, reshard_after_forward=False)
        fully_shard(model)

    twin = Twin(Recomputed, shard)
    for step in range(2):
        twin.backward(sum_loss, lambda rank, step=step: batch(step, rank, 2, 2))
        twin.check()


def test_a_recompute_after_a_units_backward_leaves_it_at_rest() -> None:
    run_ranks(_recomputed_after_its_backward, 2, 60)
