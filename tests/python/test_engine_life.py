"""The life of a unit: several forwards and backwards, in-place edits, containers, modes, accumulation, hooks."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Block, Stack, shard_blocks, shard_children, shard_root
from parity import Twin, batch
from raggedfsdp import fully_shard
from ranks import run_ranks

# --- several forwards before the backwards ---


def _two_losses(model: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], order: str) -> torch.Tensor:
    first, second = (models.weighted_loss(model, x) for x in inputs)
    if order == "sum":
        return first + second
    (first if order == "forwards" else second).backward()
    return second if order == "forwards" else first


class Twice(nn.Module):
    """A module called twice, and one called again inside its caller's second half."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.other = Block()
        models.make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.other(self.block(x)) + self.block(x)).clamp(-4, 4)


def _several_forwards(reshard: bool) -> None:
    for order in ("sum", "forwards", "backwards"):
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
        for step in range(2):
            twin.backward(
                lambda model, inputs, order=order: _two_losses(model, inputs, order),
                lambda rank, step=step: (batch(2 * step, rank, 2, WIDTH), batch(2 * step + 1, rank, 3, WIDTH)),
            )
            twin.check()
    twin = Twin(Twice, shard_children("block", "other", reshard_after_forward=reshard))
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


def _retained(reshard: bool) -> None:
    """backward twice through one graph; autograd.grad of an input; a backward through a part of the graph."""
    twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total = models.weighted_loss(model, x)
        total.backward(retain_graph=True)
        return total

    twin.backward(loss, lambda rank: batch(1, rank, 2, WIDTH))
    twin.check()
    twin.model.zero_grad()
    twin.oracle.zero_grad()
    gradients = []
    for model in (twin.model, twin.oracle):
        x = batch(2, twin.rank, 2, WIDTH).requires_grad_()
        gradients.append(torch.autograd.grad(models.weighted_loss(model, x), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards(reshard: bool, world: int) -> None:
    run_ranks(_several_forwards, world, 60, reshard)


@pytest.mark.parametrize("reshard", [True, False])
def test_one_graph_used_twice(reshard: bool) -> None:
    run_ranks(_retained, 2, 60, reshard)


# --- what users do to outputs and how they pass things ---


def _edited(model: nn.Module, x: torch.Tensor, how: tuple[str, bool]) -> torch.Tensor:
    kind, in_place = how
    out = model[0](x[None])
    out = out.squeeze(0) if kind == "view" else out.clone().squeeze(0)
    if in_place:
        out += x
    else:
        out = out + x
    out = model[1](out)
    out = out.mul_(2) if in_place else out * 2
    return out.sum()


def _edits() -> None:
    for how in itertools.product(("view", "clone"), (True, False)):
        for root in (True, False):
            twin = Twin(lambda: models.make_integer_(nn.Sequential(Block(), Block())), shard_children("0", "1", root=root))
            twin.backward(lambda m, x, how=how: _edited(m, x, how), lambda rank: batch(1, rank, 2, WIDTH))
            twin.check()


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    note: str = "text"


class Wraps(nn.Module):
    """Returns what `pack` makes of two tensors and takes keyword arguments only."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.pack = pack
        models.make_integer_(self)

    def forward(self, *, x: torch.Tensor, options: dict[str, Any]) -> Any:
        x = x * options["scales"][0] + options["nested"].logits
        return self.pack(self.block(x), self.side(x))


PACKS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda o: o),
    "list": (lambda a, b: [a, [b]], lambda o: (o[0], o[1][0])),
    "namedtuple": (Pair, lambda o: (o.left, o.right)),
    "dict": (lambda a, b: {"a": a, "in": {"b": (b, None)}}, lambda o: (o["a"], o["in"]["b"][0])),
    "ordered": (lambda a, b: OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"])),
    "defaultdict": (lambda a, b: defaultdict(list, a=[a], b=[b]), lambda o: (o["a"][0], o["b"][0])),
    "dataclass": (lambda a, b: Output(a, {"b": [b]}), lambda o: (o.logits, o.extra["b"][0])),
}


def _containers() -> None:
    for pack, unpack in PACKS.values():
        for use in ("both", "first", "second"):

            def loss(model: nn.Module, x: torch.Tensor, unpack: Any = unpack, use: str = use) -> torch.Tensor:
                y = x.clone().requires_grad_()
                out = model(x=x, options={"scales": [y], "nested": Output(x), "flag": True})
                assert type(out) is type(model.pack(x, x))
                first, second = unpack(out)
                total = {"both": first.sum() + second.sum(), "first": first.sum(), "second": second.sum()}[use]
                total.backward(retain_graph=True)
                assert y.grad is not None
                return total + y.grad.sum()

            twin = Twin(lambda pack=pack: Wraps(pack), shard_children("block"))
            twin.backward(loss, lambda rank: batch(1, rank, 2, WIDTH))
            twin.check()


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_edited_in_place(world: int) -> None:
    run_ranks(_edits, world, 60)


@pytest.mark.parametrize("world", [1, 3])
def test_containers_and_keyword_arguments(world: int) -> None:
    run_ranks(_containers, world, 60)


# --- forwards without a graph, between steps ---


def _mode(twin: Twin, mode: str, step: int) -> None:
    x = batch(step, twin.rank, 2, WIDTH)
    if mode == "train":
        for model in (twin.model, twin.oracle):
            model.zero_grad()
        twin.train(models.weighted_loss, lambda s, rank: batch(step, rank, 2, WIDTH), steps=1)
    elif mode == "save and load":
        twin.model.load_state_dict({k: v.clone() for k, v in twin.model.state_dict().items()})
    elif mode == "dropped graph":
        twin.same(mode, twin.model(x).detach(), twin.oracle(x).detach())
    else:
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            twin.same(mode, twin.model(x), twin.oracle(x))


def _orders(reshard: bool) -> None:
    for order in itertools.product(["inference", "no_grad", "train", "save and load", "dropped graph"], repeat=3):
        twin = Twin(lambda: Stack(2), shard_blocks(reshard_after_forward=reshard))
        kept = False  # without resharding, a unit stays gathered for the backward of a graph that nobody runs
        for step, mode in enumerate([*order, "train"]):
            _mode(twin, mode, step)
            kept = not reshard and (mode == "dropped graph" or (kept and mode != "train"))
            if not kept:
                twin.check()


@pytest.mark.parametrize(("reshard", "world"), [(True, 2), (False, 1)])
def test_modes_in_every_order(reshard: bool, world: int) -> None:
    run_ranks(_orders, world, 100, reshard)


# --- accumulation, divide factors, gradients of the user ---


def _accumulate(divide: float | None) -> None:
    for reshard, syncs in itertools.product((True, False), ([0, 0, 1], [1, 1], [1, 0, 1], [0, 1, 1])):
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard), divide=divide, tolerance=0.0 if divide else 1e-6)
        for step, sync in enumerate([*syncs, *syncs]):
            before = [b.reductions for u in twin.units for b in u.core.buckets]
            twin.model.set_requires_gradient_sync(bool(sync))
            twin.backward(models.weighted_loss, lambda rank, step=step: batch(step, rank, 2, WIDTH))
            after = [b.reductions for u in twin.units for b in u.core.buckets]
            assert [a - b for a, b in zip(after, before, strict=True)] == [sync] * len(after)
            if sync:
                twin.check()
        for model in (twin.model, twin.oracle):
            model.zero_grad()
        twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH), steps=1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("divide", [1.0, 4.0, None])
def test_accumulation(divide: float | None, world: int) -> None:
    run_ranks(_accumulate, world, 60, divide)


def _four_micro_batches() -> None:
    """Four gradients of 1 on every rank are 4 as a sum and 4 as a mean over ranks; never 1, never 15."""
    world = torch.distributed.get_world_size()
    for divide, sync in itertools.product((None, 1.0), (True, False)):
        model = nn.Linear(1, 1, bias=False)
        fully_shard(model)
        if divide is not None:
            model.set_gradient_divide_factor(divide)
        for micro in range(4):
            model.set_requires_gradient_sync(sync or micro == 3)
            model(torch.ones(1, 1)).backward()
        assert model.weight.grad.full_tensor().item() == (4 if divide is None else 4 * world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_four_micro_batches_of_gradient_one(world: int) -> None:
    run_ranks(_four_micro_batches, world, 60)


def _user_gradients() -> None:
    """A `.grad` the user assigned, changed, or zeroed for some parameters only, is what the next backward adds to."""
    twin = Twin(Stack, shard_blocks())
    x = lambda step: lambda rank: batch(step, rank, 2, WIDTH)  # noqa: E731
    twin.backward(models.weighted_loss, x(0))
    for i, (_, p, q) in enumerate(twin.pairs()):
        if i % 4 == 0:
            p.grad, q.grad = torch.full_like(p, 3), torch.full_like(q, 3)
        elif i % 4 == 1:
            p.grad, q.grad = None, None
        elif i % 4 == 2:
            p.grad.mul_(2)
            q.grad.mul_(2)
    twin.check()
    twin.backward(models.weighted_loss, x(1))
    twin.check()
    kept = {name: p.grad.clone() for name, p, _ in twin.pairs()}
    wanted = {name: q.grad.clone() for name, _, q in twin.pairs()}
    twin.model.zero_grad(set_to_none=False)
    twin.oracle.zero_grad(set_to_none=False)
    twin.backward(models.weighted_loss, x(2))
    twin.check()
    for name, value in kept.items():
        twin.same_piece(name, value, wanted[name])


def _accumulate_hooks() -> None:
    """Hooks for a finished gradient fire once per backward, with the reduced gradient, and may use it up."""
    twin = Twin(Stack, shard_blocks())
    fired: dict[str, int] = defaultdict(int)

    def hook_for(name: str, q: nn.Parameter) -> Callable[[Any], None]:
        def hook(p: Any) -> None:
            fired[name] += 1
            twin.same_piece(name, p.grad, wanted[name])
            p.grad = None

        return hook

    for name, p, q in twin.pairs():
        p.register_post_accumulate_grad_hook(hook_for(name, q))
    for step in range(3):
        torch.manual_seed(step)
        twin.oracle.zero_grad()
        for rank in range(twin.world):
            models.weighted_loss(twin.oracle, batch(step, rank, 2, WIDTH)).backward()
        wanted = {name: q.grad for name, _, q in twin.pairs()}
        models.weighted_loss(twin.model, batch(step, twin.rank, 2, WIDTH)).backward()
        assert all(p.grad is None for _, p, _ in twin.pairs())
        assert set(fired.values()) == {step + 1}
        assert set(fired) == set(wanted)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_and_hooks_of_the_user(world: int) -> None:
    run_ranks(_user_gradients, world, 60)
    run_ranks(_accumulate_hooks, world, 60)


# --- explicit scopes, other methods, exceptions, changes at the wrong time ---


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(WIDTH, 3)
        models.make_integer_(self)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x))

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = self.encode(x)
        if fail:
            raise RuntimeError("in the middle")
        return y


def _scopes() -> None:
    from raggedfsdp import UsageError, register_fsdp_forward_method

    twin = Twin(Encoder, shard_children("block"))
    register_fsdp_forward_method(twin.model, "encode")
    x = lambda rank: batch(1, rank, 2, WIDTH)  # noqa: E731
    twin.backward(lambda m, x: m.encode(x).sum(), x)
    twin.check()
    twin.model.unshard()
    assert torch.equal(twin.model.out.weight, twin.oracle.out.weight)
    leaf = twin.model.out.weight
    twin.model.reshard()
    twin.check_rest()
    with pytest.raises(RuntimeError, match="released"):
        leaf.sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"):
            twin.model(x(twin.rank), fail=True)
        with torch.no_grad():
            twin.same("after", twin.model(x(twin.rank)), twin.oracle(x(twin.rank)))
        twin.check_rest()
    for model in (twin.model, twin.oracle):
        model.zero_grad()
    loss = twin.model(x(twin.rank)).sum()
    with torch.no_grad():
        twin.model.out.weight.add_(1)
    with pytest.raises(UsageError, match="changed between this forward and its backward"):
        loss.backward()
    with torch.no_grad():
        twin.oracle.out.weight.add_(1)
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scopes_methods_and_exceptions(world: int) -> None:
    run_ranks(_scopes, world, 60)


def _fails_in_backward() -> None:
    twin = Twin(Stack, shard_root())
    x = batch(1, twin.rank, 2, WIDTH)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    for shard in (shard_blocks(), shard_root()):
        twin = Twin(Stack, shard)
        handle = twin.model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="in the middle of backward"):
            twin.model(x).sum().backward()
        handle.remove()
        twin.model.zero_grad()
        twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
