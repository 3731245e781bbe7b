"""What a user does with a model between two steps, in every order: each comes out as it would alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import models_for_tests as models
from models_for_tests import WIDTH, Stack, shard_blocks
from parity import Twin, batch
from raggedfsdp import full_state_dict, load_full_state_dict
from ranks import run_ranks


def de_bruijn(items: Sequence[str], length: int) -> list[str]:
    """A short list in which every `length` items in a row are another one of all orders, and every order is there."""

    def extend(t: int, p: int) -> Iterator[int]:
        if t > length:
            if length % p == 0:
                yield from a[1 : p + 1]
            return
        a[t] = a[t - p]
        yield from extend(t + 1, p)
        for j in range(a[t - p] + 1, len(items)):
            a[t] = j
            yield from extend(t + 1, t)

    a = [0] * (len(items) * length + 1)
    cycle = [items[i] for i in extend(1, 1)]
    return cycle + cycle[: length - 1]


def test_every_order_is_there() -> None:
    orders = de_bruijn("abcd", 4)
    assert len({tuple(orders[i : i + 4]) for i in range(len(orders) - 3)}) == 4**4 == len(orders) - 3


def _inference(twin: Twin, step: int) -> None:
    x = batch(step, twin.rank, 2, WIDTH)
    with torch.inference_mode():
        twin.same("inference", twin.model(x), twin.oracle(x))


def _no_grad(twin: Twin, step: int) -> None:
    x = batch(step, twin.rank, 2, WIDTH)
    with torch.no_grad():
        twin.same("no_grad", twin.model(x), twin.oracle(x))


def _train(twin: Twin, step: int) -> None:
    for model in (twin.model, twin.oracle):
        model.zero_grad()
    twin.train(models.weighted_loss, lambda s, rank: batch(step, rank, 2, WIDTH), steps=1)


def _save_and_load(twin: Twin, step: int) -> None:
    """Per rank or whole, copied or assigned."""
    if step % 3 == 2:
        load_full_state_dict(twin.model, full_state_dict(twin.model))
    else:
        twin.model.load_state_dict({k: v.clone() for k, v in twin.model.state_dict().items()}, assign=step % 3 == 1)


def _load_others(twin: Twin, step: int) -> None:
    """Other values than before, in both."""
    torch.manual_seed(step)
    state = models.make_integer_(Stack(2)).state_dict()
    twin.oracle.load_state_dict(state)
    load_full_state_dict(twin.model, {k: v.clone() for k, v in state.items()})


def _dropped_graph(twin: Twin, step: int) -> None:
    x = batch(step, twin.rank, 2, WIDTH)
    twin.same("dropped graph", twin.model(x).detach(), twin.oracle(x).detach())


def _exception(twin: Twin, step: int) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = twin.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        twin.model(batch(step, twin.rank, 2, WIDTH))
    handle.remove()


def _by_hand(twin: Twin, step: int) -> None:
    twin.model.unshard()
    assert torch.equal(twin.model.first.weight, twin.oracle.first.weight)
    twin.model.reshard()


def _evaluate(twin: Twin, step: int) -> None:
    for model in (twin.model, twin.oracle):
        model.eval()
    _no_grad(twin, step)
    for model in (twin.model, twin.oracle):
        model.train()


Act = Callable[[Twin, int], None]
FOUR: dict[str, Act] = {"inference": _inference, "no_grad": _no_grad, "train": _train, "save and load": _save_and_load}
ALL: dict[str, Act] = {
    **FOUR,
    "load others": _load_others,
    "dropped graph": _dropped_graph,
    "exception": _exception,
    "by hand": _by_hand,
    "evaluate": _evaluate,
}


def _orders(names: Sequence[str], length: int, reshard: bool | None) -> None:
    twin = Twin(lambda: Stack(2), shard_blocks(reshard_after_forward=reshard))
    kept = False  # a unit that is not released after forward waits for the backward of a graph that nobody runs
    leave_graphs = ("dropped graph", "exception")
    for step, name in enumerate([*de_bruijn(names, length), "train"]):
        ALL[name](twin, step)
        kept = reshard is not True and (name in leave_graphs or (kept and name != "train"))
        if not kept:
            twin.check()
            assert twin.context.pool_used_bytes == 0, f"after {name}"


@pytest.mark.parametrize(("reshard", "world"), [(True, 2), (False, 1), (False, 3)])
def test_every_order_of_four(reshard: bool, world: int) -> None:
    run_ranks(_orders, world, 100, list(FOUR), 4, reshard)


@pytest.mark.parametrize(("reshard", "world"), [(True, 2), (None, 2), (False, 1)])
def test_every_order_of_two_of_more(reshard: bool | None, world: int) -> None:
    run_ranks(_orders, world, 100, list(ALL), 2, reshard)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_every_order_of_three_of_more(reshard: bool | None, world: int) -> None:
    run_ranks(_orders, world, 300, list(ALL), 3, reshard)
