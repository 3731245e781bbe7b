"""What a session of breaking the engine found: each was silent, or took the process down."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks, shard_children, shard_root
from parity import Twin, batch
from raggedfsdp import UsageError, fully_shard
from raggedfsdp._state import units_in
from ranks import run_ranks


class Loss(nn.Module):
    """Returns its loss: backward starts at the unit's own output. Ranks use different branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "ab")
        models.make_integer_(self)

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.middle(self.embed(tokens)).clamp(-3, 3)).sum()


def _backward_from_the_output() -> None:
    twin = Twin(Loss, shard_children("middle"))
    twin.backward(lambda m, a: m(*a), lambda rank: (torch.arange(4) + rank, rank % 2))
    twin.check()
    for unit in units_in(twin.model):
        assert all(b.reductions == 1 for b in unit.core.buckets)
    twin = Twin(lambda: models.make_integer_(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))), shard_children("1"))
    x = batch(1, twin.rank, 2, WIDTH).requires_grad_()
    out = twin.model(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    expected = x.detach().requires_grad_()
    twin.oracle(expected).sum().backward()
    assert torch.equal(gradient, expected.grad)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.layers[name](x)


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = Branches()
        models.make_integer_(self)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.rest(self.first(x), name)


def _second_reduction() -> None:
    """A gradient that comes after the unit's reduction must not overwrite what other ranks gave in it."""
    twin = Twin(Behind, shard_children("rest"))

    def loss(model: nn.Module, arguments: Any) -> torch.Tensor:
        if model is twin.model:
            model.rest.unshard()
        late = (model.rest.layers["a"].weight * 3).sum()
        return model(*arguments).sum() + late

    twin.backward(loss, lambda rank: (batch(1, rank, 2, WIDTH), "a" if rank == 1 else "b"))
    twin.model.rest.reshard()
    twin.check()


class Optional_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.layer(x) if use else x * 1


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Optional_()
        self.before = nn.Linear(WIDTH, WIDTH)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor, use: bool, skip: bool) -> torch.Tensor:
        x = self.before(x)
        return x if skip else self.unit(x, use)


def _owed_reduction() -> None:
    """Accumulated without synchronisation on one rank only; the synchronised backward does not enter the unit."""
    twin = Twin(Skips, shard_children("unit"))
    twin.model.set_requires_gradient_sync(False)
    twin.backward(lambda m, a: m(*a).sum(), lambda rank: (batch(1, rank, 2, WIDTH), rank == 0, False))
    twin.model.set_requires_gradient_sync(True)
    twin.backward(lambda m, a: m(*a).sum(), lambda rank: (batch(2, rank, 2, WIDTH), False, True))
    twin.check()


def _collected() -> None:
    units = []
    for _ in range(3):
        model = nn.Linear(WIDTH, WIDTH)
        original = model.weight
        fully_shard(model)
        model(torch.ones(2, WIDTH)).sum().backward()
        units += [weakref.ref(unit) for unit in units_in(model)]
        del model
    gc.collect()
    assert original is not None
    assert [unit() for unit in units] == [None, None, None]


def _frozen_while_whole() -> None:
    twin = Twin(lambda: models.make_integer_(nn.Linear(WIDTH, WIDTH)), shard_root())
    twin.model.unshard()
    twin.model.weight.requires_grad_(False)
    twin.model.reshard()
    assert not twin.model.weight.requires_grad
    twin.model.weight.requires_grad_(True)
    twin.backward(models.weighted_loss, lambda rank: batch(1, rank, 2, WIDTH))
    twin.check()
    twin.model.unshard()
    twin.model.zero_grad()
    twin.model.reshard()
    assert twin.model.weight.grad is None


class Interrupted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def _interrupted_forward() -> None:
    twin = Twin(lambda: models.make_integer_(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())), shard_root())
    twin.model[1] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        twin.model(batch(1, twin.rank, 2, WIDTH))
    twin.model[1] = nn.Identity()
    twin.backward(models.weighted_loss, lambda rank: batch(1, rank, 2, WIDTH))
    twin.check()


def _refused() -> None:
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(WIDTH, WIDTH)
    fully_shard(model)
    with pytest.raises(BaseException, match="full_state_dict"):  # torch wraps it in one that is no Exception
        dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter("/nonexistent"))
    model.weight.register_hook(lambda g: g)
    with pytest.raises(UsageError, match="register_post_accumulate_grad_hook"):
        model(torch.ones(2, WIDTH))


def _backward_after_a_failed_one() -> None:
    """No forward between the two: the second is a whole backward, not one inside the first."""
    twin = Twin(Stack, shard_blocks())

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if model is twin.model:
            failing = model(x)
            failing.register_hook(fail)
            kept = models.weighted_loss(model, x)
            with pytest.raises(RuntimeError, match="first"):
                failing.sum().backward()
            return kept
        return models.weighted_loss(model, x)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("first")

    twin.backward(loss, lambda rank: batch(1, rank, 2, WIDTH))
    twin.check()
    assert twin.model._ragged_unit.context.pool_used_bytes == 0


class EditsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return self.linear(x)


class UsesItAfterwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.edits = EditsItsInput()
        models.make_integer_(self)

    def forward(self, x: torch.Tensor, view: bool) -> torch.Tensor:
        h = self.first(x)
        h = h.view(-1, 2, WIDTH // 2).flatten(1) if view else h
        y = self.edits(h)
        return y + h


def _input_edited_in_place() -> None:
    """What the caller does with the input afterwards sees the edit's gradient."""
    for view in (False, True):
        twin = Twin(UsesItAfterwards, shard_children("edits"))
        twin.backward(lambda m, a: m(*a).sum(), lambda rank, view=view: (batch(1, rank, 2, WIDTH), view))  # type: ignore[misc]
        twin.check()
    model = EditsItsInput()
    fully_shard(model)
    with pytest.raises(UsageError, match="edited an input in place"):
        model(torch.ones(2, WIDTH, requires_grad=True))


BODIES = [
    _input_edited_in_place,
    _backward_after_a_failed_one,
    _backward_from_the_output,
    _second_reduction,
    _owed_reduction,
    _collected,
    _frozen_while_whole,
    _interrupted_forward,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
@pytest.mark.parametrize("world", [1, 2])
def test_found(body: Any, world: int) -> None:
    run_ranks(body, world, 60)


def test_refused() -> None:
    run_ranks(_refused, 1, 60)
