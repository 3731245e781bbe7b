"""What FSDP2's own tests ask of units: classes, hooks, methods, errors, and modules of odd kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Block, Stack, shard_blocks, shard_children, shard_root
from modes import buckets_of, clear_counts
from parity import Twin, batch
from raggedfsdp import FSDPModule, UsageError, fully_shard, register_fsdp_forward_method
from raggedfsdp.tensor import RaggedDTensor
from ranks import run_ranks


def x_of(step: int) -> Any:
    return lambda rank: batch(step, rank, 2, WIDTH)


# --- classes and errors ---


def _classes() -> None:
    model = Stack(2)
    fully_shard(model.blocks[0])
    fully_shard(model)
    assert isinstance(model, Stack)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPStack"
    wrapped = {name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    assert wrapped == {"", "blocks.0"}
    row: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    fully_shard(row)
    assert type(row[:2]) is nn.Sequential
    assert isinstance(row[:2][0].weight, RaggedDTensor)
    with pytest.raises(UsageError, match="wrapped already"):
        fully_shard(model)
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(UsageError, match="has no forward"):
            fully_shard(container)
    with pytest.raises(UsageError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    for name in (
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_symm_mem_for_comm",
        "set_separate_reduce_scatter_group",
    ):
        with pytest.raises(NotImplementedError, match=name):
            getattr(model, name)(None)


def _subclasses() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(TwoTensor(linear.weight.detach(), linear.weight.detach().clone()))
    with pytest.raises(NotImplementedError, match="weight"):
        fully_shard(linear)


def test_classes_and_errors() -> None:
    run_ranks(_classes, 1, 60)


def test_tensor_subclasses_are_refused() -> None:
    run_ranks(_subclasses, 1, 60)


# --- modules of odd kinds ---


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x + ys[0] + ys[1] + 1


class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def forward(self) -> torch.Tensor:
        return self.weight @ self.weight


def _odd() -> None:
    empty: Any = NoParameters()
    fully_shard(empty)
    x = torch.ones(3, requires_grad=True)
    empty.unshard(async_op=True).wait()
    empty(x, (x, x)).sum().backward()
    empty.reshard()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    for make in (NoInputs, lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2)):
        twin = Twin(lambda make=make: models.make_integer_(make()), shard_root())
        run = (lambda m, x: m().sum()) if make is NoInputs else (lambda m, x: m(x).sum())
        twin.backward(run, lambda rank: batch(1, rank, 2, 4))
        twin.check()
    shared = Twin(SharedLayer, shard_root())
    shared.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


class SharedLayer(nn.Sequential):
    """Two blocks with one layer between them, and one buffer."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self[0].up = self[1].up
        self[0].register_buffer("seen", torch.zeros(2))
        self[1].register_buffer("seen", self[0].seen)
        models.make_integer_(self)


class Quantised(nn.Module):
    """Frozen parameters that no reduction could sum: fp8 and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.eights = nn.Parameter(torch.arange(6.0).to(torch.float8_e4m3fn), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.eights.float() + self.whole.sum()


def _quantised() -> None:
    twin = Twin(Quantised, shard_root())
    for step in range(2):
        twin.backward(lambda m, x: m(x).sum(), lambda rank, step=step: batch(step, rank, 6))
    assert torch.equal(twin.model.weight.grad.full_tensor(), twin.oracle.weight.grad)
    for name in ("eights", "whole"):
        assert torch.equal(twin.model.get_parameter(name).full_tensor().float(), twin.oracle.get_parameter(name).float())


@pytest.mark.parametrize("world", [1, 3])
def test_modules_of_odd_kinds(world: int) -> None:
    run_ranks(_odd, world, 60)
    run_ranks(_quantised, world, 60)


# --- a unit's own forwards, methods, events ---


def _non_root() -> None:
    """A unit by itself, before, between and after forwards of the model around it."""
    twin = Twin(Stack, shard_blocks())
    inner = lambda m, x: m.blocks[1](x).sum()  # noqa: E731
    for step, loss in enumerate((inner, models.weighted_loss, inner, inner, models.weighted_loss)):
        twin.backward(loss, x_of(step))
        twin.check()
    inside = Twin(Stack, shard_blocks())
    for _ in range(2):
        both = lambda m, x: inner(m, x) + models.weighted_loss(m, x)  # noqa: E731
        inside.backward(both, x_of(3))
        inside.check()


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 2)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images).sum(dim=1)


class UsesFeatures(nn.Module):
    """Calls a method of the unit inside it that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = Vision(), nn.Linear(4, 3)
        models.make_integer_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vision.features(images))


def _methods() -> None:
    def shard(model: Any) -> None:
        shard_children("vision", "projector")(model)
        register_fsdp_forward_method(model.vision, "features")

    twin = Twin(UsesFeatures, shard)
    twin.train(models.sum_loss, lambda step, rank: batch(step, rank, 2, 3, 4, 4))


class FakeEvent:
    waits = 0

    def wait(self) -> None:
        self.waits += 1


def _event() -> None:
    """The event after an optimiser step is waited for once, by the next forward."""
    twin = Twin(Stack, shard_blocks())
    event = FakeEvent()
    twin.model.set_post_optim_event(event)
    for step in range(2):
        twin.backward(models.weighted_loss, x_of(step))
        assert event.waits == 1


@pytest.mark.parametrize("world", [1, 2])
def test_forwards_methods_and_events(world: int) -> None:
    for body in (_non_root, _methods, _event):
        run_ranks(body, world, 60)


# --- settings of one unit or of all below it ---


def _settings() -> None:
    n = 3
    twin = Twin(Stack, shard_blocks())
    root, *blocks = twin.units
    for recurse, forward in ((True, False), (False, True), (True, True), (False, False)):
        twin.model.set_reshard_after_forward(forward, recurse=recurse)
        clear_counts(twin)
        twin.backward(models.weighted_loss, x_of(0))
        assert root.core.buckets[0].gathers == (2 if forward else 1)
        if recurse:
            assert [u.core.buckets[0].gathers for u in blocks] == [2 if forward else 1] * n
    with pytest.raises(UsageError, match="bool"):
        twin.model.set_reshard_after_forward(2)
    twin = Twin(Stack, shard_blocks())
    twin.model.set_gradient_divide_factor(4.0)  # of the outermost unit only
    twin.backward(models.weighted_loss, x_of(1))
    for name, p, q in twin.pairs():
        want = q.grad if name.startswith("blocks") else q.grad / 4
        assert torch.equal(p.grad.full_tensor(), want), name


def _by_hand_after_forward() -> None:
    """reshard() after a forward that kept everything: backward gathers again."""
    twin = Twin(Stack, shard_blocks(reshard_after_forward=False))
    clear_counts(twin)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = models.weighted_loss(model, x)
        if model is twin.model:
            assert all(b.gathers == 1 and b.gathered for b in buckets_of(twin))
            for m in model.modules():
                if isinstance(m, FSDPModule):
                    m.reshard()
            assert not any(b.gathered for b in buckets_of(twin))
        return out

    twin.backward(loss, x_of(0))
    twin.check()
    assert {(b.gathers, b.reductions) for b in buckets_of(twin)} == {(2, 1)}


@pytest.mark.parametrize("world", [1, 2])
def test_settings_and_resharding_by_hand(world: int) -> None:
    run_ranks(_settings, world, 60)
    run_ranks(_by_hand_after_forward, world, 60)


# --- gathering ahead ---


def gathers_ahead(twin: Twin, kind: str) -> list[tuple[str, str]]:
    """(unit entered, unit gathered ahead there) in the part of the step called `kind`, in order."""
    names = {u.core.index: u.name for u in twin.units}
    found, entered, inside = [], "", False
    for event, unit, _ in twin.context.events:
        if event in ("forward", "backward"):
            entered, inside = names[unit], event == kind
        elif event == "prefetch" and inside:
            found.append((entered, names[unit]))
    return found


def _ahead() -> None:
    twin = Twin(Stack, shard_blocks(reshard_after_forward=True))
    blocks = list(twin.model.blocks)
    for n in (1, 2):
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + n])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - n) : i][::-1])
        twin.context.clear_events()
        twin.backward(models.weighted_loss, x_of(n))
        forward = [pair for pair in gathers_ahead(twin, "forward") if pair[0].startswith("blocks")]
        backward = [pair for pair in gathers_ahead(twin, "backward") if pair[0].startswith("blocks")]
        if n == 1:
            assert forward == [("blocks.0", "blocks.1"), ("blocks.1", "blocks.2")]
            assert backward == [("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")]
        else:
            assert forward == [("blocks.0", "blocks.1"), ("blocks.0", "blocks.2")]
            assert backward == [("blocks.2", "blocks.1"), ("blocks.2", "blocks.0")]
        twin.check()
    # A unit that is not needed again: it is let go at the end, and the numbers are right.
    blocks[0].set_modules_to_backward_prefetch([blocks[2]])
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
    assert twin.context.pool_used_bytes == 0


def _unshard_ahead(reshard: bool | None) -> None:
    """FSDP2 users gather the first units before forward; the units' own forward and backward let go of them."""
    twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
    for step in range(2):
        for unit in (twin.model, *twin.model.blocks):
            unit.unshard(async_op=True)
        twin.backward(models.weighted_loss, x_of(step))
        twin.check()
        norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1e-3)
        assert norm.full_tensor() > 0
        twin.model.zero_grad()
        twin.oracle.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_gathering_ahead(world: int) -> None:
    run_ranks(_ahead, world, 60)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_unshard_ahead_of_forward(reshard: bool | None) -> None:
    run_ranks(_unshard_ahead, 2, 60, reshard)


# --- gradients that were not reduced; transforms ---


def _zero_grad(set_to_none: bool) -> None:
    twin = Twin(Stack, shard_blocks())
    for step, sync in enumerate((False, True)):
        for model in (twin.model, twin.oracle):
            model.zero_grad(set_to_none=set_to_none)
        twin.model.set_requires_gradient_sync(sync)
        twin.backward(models.weighted_loss, x_of(step))
    twin.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_was_not_reduced(set_to_none: bool) -> None:
    run_ranks(_zero_grad, 2, 60, set_to_none)


def _forward_mode() -> None:
    torch.manual_seed(0)
    oracle = nn.Linear(4, 4)
    model = copy.deepcopy(oracle)
    fully_shard(model)
    x, tangent = torch.ones(2, 4), torch.arange(8.0).view(2, 4)
    for _ in range(2):
        came, want = (torch.func.jvp(m, (x,), (tangent,)) for m in (model, oracle))
        assert torch.equal(came[0], want[0])
        assert torch.equal(came[1], want[1])
    assert dist.is_initialized()


def test_forward_mode() -> None:
    run_ranks(_forward_mode, 2, 60)
