"""torch.compile of blocks and of whole models: the oracle's numbers, and nothing compiled again once a step has run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks
from parity import Twin, batch
from raggedfsdp import MixedPrecisionPolicy
from ranks import run_ranks

Shard = Callable[[Any], None]


def in_place(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def wrapped(model: Any, **options: Any) -> None:
    """As a module of its own around each block, which is what is sharded then."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)


def forward_only(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)


# How blocks are compiled, and whether before they are sharded.
STYLES: dict[str, tuple[Callable[..., None], bool]] = {
    "in place, before": (in_place, True),
    "in place, after": (in_place, False),
    "wrapped, before": (wrapped, True),
    "wrapped, after": (wrapped, False),
    "forward, before": (forward_only, True),
    "forward, after": (forward_only, False),
}


def sharding(style: str, reshard: bool, **options: Any) -> Shard:
    compile_blocks, before = STYLES[style]

    def shard(model: Any) -> None:
        if before:
            compile_blocks(model, **options)
        shard_blocks(reshard_after_forward=reshard)(model)
        if not before:
            compile_blocks(model, **options)

    return shard


class CompiledTwin(Twin):
    def pairs(self) -> Iterator[tuple[str, Any, nn.Parameter]]:
        """torch.compile's wrapper is in the names."""
        sharded = {name.replace("_orig_mod.", ""): p for name, p in self.model.named_parameters()}
        whole = dict(self.oracle.named_parameters())
        assert list(sharded) == list(whole)
        for name, p in sharded.items():
            yield name, p, whole[name]


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """The processes of the ranks live on: what is compiled for one case must not count in the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def train(twin: Twin, loss: Any = models.weighted_loss, steps: int = 5) -> int:
    """The number of graphs; from the third step on there must be no new one."""
    for step in range(steps):
        before = graphs()
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            twin.train(loss, lambda s, rank, step=step: batch(step, rank, 2, WIDTH), steps=1)
        assert step < 2 or graphs() == before
    return graphs()


def _blocks(backend: str, cases: list[tuple[str, bool]]) -> None:
    for style, reshard in cases:
        with fresh_dynamo():
            compiled = train(CompiledTwin(lambda: Stack(2), sharding(style, reshard, backend=backend)))
            assert compiled > 0, style


@pytest.mark.parametrize("world", [1, 2])
def test_blocks(world: int) -> None:
    cases = [(style, i % 2 == world % 2) for i, style in enumerate(STYLES)]
    run_ranks(_blocks, world, 110, "aot_eager", cases)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("world", [1, 2])
def test_blocks_in_every_way(world: int, backend: str) -> None:
    run_ranks(_blocks, world, 1000, backend, list(itertools.product(STYLES, (True, False))))


def _no_breaks() -> None:
    """Hooks stay outside where only what is inside a unit is compiled: one whole graph per block."""
    for style in ("wrapped, before", "forward, before", "forward, after"):
        with fresh_dynamo():
            shard = sharding(style, True, backend="aot_eager", fullgraph=True)
            assert train(CompiledTwin(lambda: Stack(2), shard)) > 0
            assert breaks() == 0, style


def _modes() -> None:
    """Evaluation between steps, accumulation, and blocks of several sizes."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            twin.same("evaluation", twin.model(x), twin.oracle(x))
        return models.weighted_loss(model, x)

    with fresh_dynamo():
        twin = CompiledTwin(lambda: Stack(2), sharding("in place, after", True, backend="aot_eager"))
        train(twin, loss)
        for sync in (False, True):
            twin.model.set_requires_gradient_sync(sync)
            twin.backward(loss, lambda rank: batch(10, rank, 2, WIDTH))
        twin.check()


@pytest.mark.parametrize("world", [1, 2])
def test_whole_graphs_and_modes(world: int) -> None:
    run_ranks(_no_breaks, world, 110)
    run_ranks(_modes, world, 110)


def _whole_model(reshard: bool) -> None:
    """Hooks break the graph; what lies between is compiled, and the numbers are right."""
    for in_place_too in (True, False):
        with fresh_dynamo():
            twin = Twin(lambda: Stack(2), shard_blocks(reshard_after_forward=reshard))
            if in_place_too:
                twin.model.compile(backend="aot_eager")
                run = twin.model
            else:
                run = torch.compile(twin.model, backend="aot_eager")

            def loss(model: nn.Module, x: torch.Tensor, ours: Any = twin.model, run: Any = run) -> torch.Tensor:
                return models.weighted_loss(run if model is ours else model, x)

            assert train(twin, loss) > 0


@pytest.mark.parametrize("world", [1, 2])
def test_whole_model(world: int) -> None:
    for reshard in (True, False):
        run_ranks(_whole_model, world, 110, reshard)


def _mixed_precision() -> None:
    """Compiled and not, the same bits."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results = []
    for compiled in (False, True):
        with fresh_dynamo():
            torch.manual_seed(3)
            model: Any = Stack(2)
            if compiled:
                in_place(model, backend="aot_eager")
            shard_blocks(mp_policy=policy)(model)
            optimiser = torch.optim.SGD(model.parameters(), 1 / 32)
            for step in range(3):
                models.weighted_loss(model, batch(step, torch.distributed.get_rank(), 2, WIDTH)).backward()
                optimiser.step()
                optimiser.zero_grad()
            results.append([p.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision(world: int) -> None:
    run_ranks(_mixed_precision, world, 60)
