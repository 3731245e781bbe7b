"""Training steps equal the unsharded model's, bit for bit, however the model is wrapped and driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Adapter, Block, Branches, Stack, Tied, shard_blocks, shard_children, shard_root
from parity import Twin, batch
from raggedfsdp import Granularity, fully_shard
from ranks import run_ranks

WORLDS = [1, 2, 3, 4]


def rows_or_whole(name: str, shape: torch.Size) -> Granularity:
    return Granularity.rows(2) if len(shape) == 2 else Granularity.tensor()


def in_pairs(model: Stack) -> None:
    """Units of several modules: the first linear with the first block, the other blocks together."""
    fully_shard([model.first, model.blocks[0]])
    fully_shard(list(model.blocks[1:]))
    fully_shard(model)


def nested_deeply(model: Stack) -> None:
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "root only": shard_root(),
    "blocks": shard_blocks(),
    "blocks, kept after forward": shard_blocks(reshard_after_forward=False),
    "blocks, root released too": shard_blocks(reshard_after_forward=True),
    "nested": nested_deeply,
    "several modules": in_pairs,
    "rows": shard_blocks(orig_param_policy=rows_or_whole),
}


def _wrapping(name: str) -> None:
    twin = Twin(Stack, WRAPPINGS[name])
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 4, WIDTH))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_wrapping_trains_alike(name: str, world: int) -> None:
    run_ranks(_wrapping, world, 60, name)


def tokens(step: int, rank: int, rows: int) -> torch.Tensor:
    # The last row, on the last rank, is somebody's input.
    return (rows - 1 - torch.arange(3) * 3 - step * 2 - rank) % rows


def _tied(rows: int, tie: bool, reshard: bool) -> None:
    shard = shard_children("embedding", "body", "head", root=False, reshard_after_forward=reshard)
    twin = Twin(lambda: Tied(rows, tie=tie), shard)
    start = twin.oracle.embedding.weight.detach().clone()
    twin.train(models.weighted_loss, lambda step, rank: tokens(step, rank, rows), steps=4)
    assert (twin.model.embedding.weight is twin.model.head.weight) == tie
    assert (twin.oracle.embedding.weight[-1] != start[-1]).any(), "the last row was to be trained"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("rows", "tie", "reshard"), [(10, True, True), (10, False, True), (8, True, False), (8, False, False)])
def test_tied_embedding_in_two_units(rows: int, tie: bool, reshard: bool, world: int) -> None:
    run_ranks(_tied, world, 60, rows, tie, reshard)


def _frozen(root: bool) -> None:
    """Frozen weights are gathered but have no gradient memory; freezing and unfreezing later works."""
    twin = Twin(lambda: nn.Sequential(Adapter(), Adapter()), shard_children("0", "1", root=root))
    x = lambda step, rank: batch(step, rank, 3, 8)  # noqa: E731
    twin.train(models.weighted_loss, x, steps=2)
    frozen = [u.core.buckets[p.bucket] for u in twin.units for p in u.parameters if not p.sharded.requires_grad]
    assert frozen
    assert all(b.reductions == 0 and b.gradient_shard_bytes == 0 and b.gathers > 0 for b in frozen)
    for step, (name, requires_grad) in enumerate(
        [("0.a.weight", False), ("1.frozen.weight", True), ("0.a.weight", True), ("1.frozen.weight", False)]
    ):
        for model in (twin.model, twin.oracle):
            model.zero_grad()
            model.get_parameter(name).requires_grad_(requires_grad)
        twin.train(models.weighted_loss, lambda s, rank, step=step: x(10 * step + s, rank), steps=2)
    for model in (twin.model, twin.oracle):
        model.requires_grad_(False)
    assert not twin.model(x(0, 0)).requires_grad


@pytest.mark.parametrize("world", WORLDS)
def test_frozen_parameters(world: int) -> None:
    run_ranks(_frozen, world, 60, world % 2 == 0)


def _lora(reshard: bool) -> None:
    """The gradient of the input runs through the frozen weight after the adapters' gradients are done."""
    twin = Twin(Adapter, shard_root(reshard_after_forward=reshard))
    for step in range(2):
        inputs: dict[int, torch.Tensor] = {}

        def loss(model: nn.Module, x: torch.Tensor, inputs: dict[int, torch.Tensor] = inputs) -> torch.Tensor:
            inputs[id(model)] = x
            return models.weighted_loss(model, x)

        twin.backward(loss, lambda rank, step=step: batch(step, rank, 3, 8).requires_grad_())
        twin.check()
        own = batch(step, twin.rank, 3, 8).requires_grad_()
        models.weighted_loss(twin.oracle, own).backward()
        assert torch.equal(inputs[id(twin.model)].grad, own.grad)
        twin.model.zero_grad()
        twin.oracle.zero_grad()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lora_and_the_gradient_of_its_input(world: int) -> None:
    for reshard in (True, False):
        run_ranks(_lora, world, 60, reshard)


def _branches(wrapped: str) -> None:
    """Rank 0 uses layer a, the others b (or both); nobody uses c, whose gradient stays None so that decay leaves it alone."""
    twin = Twin(Branches, shard_root() if wrapped == "one" else shard_children("layers.c"))
    optimisers = [torch.optim.SGD(m.parameters(), 0.5, weight_decay=1.0) for m in (twin.model, twin.oracle)]
    plans = [["a", "b", "b", "b"], ["ab", "b", "a", "ba"], ["ab"] * 4, ["a", "a", "a", "a"], ["b", "a", "ab", "ab"]]
    for step, plan in enumerate(plans):
        loss = lambda model, args: model(*args).sum()  # noqa: E731
        twin.backward(loss, lambda rank, step=step, plan=plan: (batch(step, rank, 2, WIDTH), plan[rank]))
        twin.check()
        assert twin.model.layers["c"].weight.grad is None
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        twin.check()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wrapped", ["one", "unused unit"])
def test_unused_parameters(wrapped: str, world: int) -> None:
    run_ranks(_branches, world, 60, wrapped)


class NormAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.norm = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor, runs: str) -> torch.Tensor:
        x = self.body(x)
        out = x.sum()
        for module in runs:
            if module == "n":
                x = self.norm(x).clamp(-4, 4)
            else:
                out = out + (self.head(x).clamp(-4, 4) * torch.tensor([1.0, -1.0, 2.0])).sum()
        return out + x.sum()


def norm_with_head(model: NormAndHead) -> None:
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def _norm_head(root: bool) -> None:
    shard = norm_with_head if root else lambda m: fully_shard([m.norm, m.head])
    twin = Twin(NormAndHead, shard)
    for step, runs in enumerate(["nh", "nhh", "n", "nhh", "hn", "h", "", "nnhh", "nh"]):
        args = lambda rank, step=step, runs=runs: (batch(step, rank, 2, WIDTH), runs)  # noqa: E731
        if root:
            twin.backward(lambda model, a: model(*a), args)
            twin.check()
        else:
            _forward_only_inner(twin, args)
        for model in (twin.model, twin.oracle):
            model.zero_grad()


def _forward_only_inner(twin: Twin, args: Callable[[int], Any]) -> None:
    """Without an outermost unit the plain parameters' gradients are each rank's own: only the unit's are compared."""
    twin.backward(lambda model, a: model(*a), args)
    for name, p, q in twin.pairs():
        if name.startswith(("norm", "head")):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                twin.same_piece(name, p.grad, q.grad)
    twin.check_rest()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("root", [True, False])
def test_unit_of_several_modules_that_do_not_all_run_once(root: bool, world: int) -> None:
    run_ranks(_norm_head, world, 60, root)


class Layouts(nn.Module):
    """A transposed weight and a channels-last one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.empty(6, 4).t())
        self.conv = nn.Conv2d(3, 4, 2, bias=False)
        models.make_integer_(self)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).clamp(-4, 4).flatten(1)
        return y.narrow(1, 0, 4) @ self.turned


def _layouts() -> None:
    twin = Twin(Layouts, shard_root())
    assert not twin.oracle.turned.is_contiguous()
    x = batch(9, 0, 2, 3, 4, 4)
    with torch.no_grad():
        twin.same("forward", twin.model(x), twin.oracle(x))
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, 3, 4, 4))


def _geometry() -> None:
    twin = Twin(models.Shapes, shard_root())
    twin.train(models.sum_loss, lambda step, rank: batch(step, rank, 3))
    assert twin.model.weights[4].shape == ()


@pytest.mark.parametrize("world", WORLDS)
def test_layouts_and_tiny_shapes(world: int) -> None:
    run_ranks(_layouts, world, 60)
    run_ranks(_geometry, world, 60)


def _rebuilt() -> None:
    """Object ids are reused: nothing may take a fresh module for one that is gone."""
    for i in range(50):
        block = Block()
        fully_shard(block)
        if i % 10 == 0:
            block(torch.ones(1, WIDTH)).sum().backward()
        del block


def _tied_from_meta() -> None:
    with torch.device("meta"):
        model = Tied()
    shard_children("embedding", "head")(model)
    model.to_empty(device="cpu")
    assert model.embedding.weight is model.head.weight
    with torch.no_grad():
        model.embedding.weight.fill_(1.0)
        model.body.weight.fill_(1.0)
    model(torch.tensor([1, 2])).sum().backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight is model.head.weight


@pytest.mark.parametrize("world", [1, 3])
def test_built_again_and_from_meta(world: int) -> None:
    run_ranks(_rebuilt, world, 60)
    run_ranks(_tied_from_meta, world, 60)
