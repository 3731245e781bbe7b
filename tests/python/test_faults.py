"""A rank that dies at any point of a step: the others raise a CommError that names it, soon. A slow one changes nothing."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models_for_tests import WIDTH, Stack, weighted_loss
from parity import Twin, batch
from raggedfsdp import CommError, full_state_dict, fully_shard
from raggedfsdp._C import make_process_group_comm
from raggedfsdp._state import units_in
from ranks import GROUP_TIMEOUT_S, run_ranks

SOON_S = 8  # well below the group's own limit; most of it is for a machine that is busy
assert SOON_S < GROUP_TIMEOUT_S / 2

Act = Callable[..., None]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_(*_: Any) -> None:
    os._exit(1)


# --- the points of a step, by name; `act` runs at one of them ---


def build(point: str, act: Act) -> Any:
    torch.manual_seed(1)
    model: Any = Stack(2)
    for block in model.blocks:
        fully_shard(block)
        if point == "in fully_shard":
            act()
    fully_shard(model)
    return model


def arm(point: str, model: Any, optimiser: torch.optim.Optimizer, act: Act) -> None:
    if point == "in a forward hook":
        model.blocks[0].register_forward_hook(act)
    elif point == "inside a unit's forward":
        model.blocks[0].down.register_forward_pre_hook(act)
    elif point == "between units":
        model.blocks[1].register_forward_pre_hook(act, prepend=True)
    elif point == "in a tensor's hook":
        model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(act) and None)
    elif point == "in a post-accumulate hook":
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(act)
    elif point == "in the optimiser":
        optimiser.register_step_pre_hook(act)
    elif point == "in full_state_dict":
        model.register_state_dict_post_hook(act)


def step(point: str, model: Any, optimiser: torch.optim.Optimizer, act: Act, i: int) -> None:
    if point == "before forward":
        act()
    loss = weighted_loss(model, batch(i, dist.get_rank(), 2, WIDTH))
    if point == "between forward and backward":
        act()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    full_state_dict(model)


POINTS = [
    "in fully_shard",
    "before forward",
    "inside a unit's forward",
    "in a forward hook",
    "between units",
    "between forward and backward",
    "in a tensor's hook",
    "in a post-accumulate hook",
    "in the optimiser",
    "in full_state_dict",
]


def _train(point: str, victim: int, act: Act) -> str:
    """What the survivors see: text that says how it ended. A healthy step comes first."""
    act = act if dist.get_rank() == victim else lambda *_: None
    if point == "in fully_shard":
        return survive(lambda: build(point, act).reset_iter_state(), None)
    model = build("", act)
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    step("", model, optimiser, act, 0)
    arm(point, model, optimiser, act)
    return survive(lambda: step(point, model, optimiser, act, 1), model)


def survive(do: Callable[[], None], model: Any) -> str:
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 2 * SOON_S:
            do()
    except CommError as error:
        took = time.monotonic() - begin
        return f"{afterwards(model)}{'' if took < SOON_S else f'late, {took:.0f} s: '}{error}"
    return "no error"


def afterwards(model: Any) -> str:
    """The model can be let go, and what is tried with it is an error again; neither waits for the dead."""
    if model is None:
        return ""
    begin = time.monotonic()
    model.reset_iter_state()
    try:
        weighted_loss(model, batch(0, 0, 2, WIDTH)).backward()
        return "a step without the dead rank: "
    except CommError:
        pass
    del model
    gc.collect()
    took = time.monotonic() - begin
    return "" if took < SOON_S else f"{took:.0f} s to recover: "


def expect_named(said: list[Any], victim: int) -> None:
    for rank, text in enumerate(said):
        if rank == victim:
            assert text is None
        else:
            who, _, what = text.partition(f"rank {rank} of {len(said)}: ")
            assert who == "Comm 'gloo', ", f"rank {rank}: {text}"
            assert f"rank {victim} is gone" in what or f"to rank {victim}: " in what, f"rank {rank}: {text}"


QUICK = [
    ("in fully_shard", 2, 1),
    ("inside a unit's forward", 3, 0),
    ("in a post-accumulate hook", 3, 1),
    ("in full_state_dict", 4, 3),
]
LONG = [(point, world, (i + world) % world) for i, point in enumerate(POINTS) for world in (2, 3, 4)]


@pytest.mark.parametrize(("point", "world", "victim"), QUICK)
def test_a_dead_rank_is_named(point: str, world: int, victim: int) -> None:
    expect_named(run_ranks(_train, world, 60, point, victim, die, dying=[victim]), victim)


@pytest.mark.long
@pytest.mark.parametrize(("point", "world", "victim"), [case for case in LONG if case not in QUICK])
def test_a_dead_rank_is_named_at_every_point(point: str, world: int, victim: int) -> None:
    act = die if world % 2 else exit_
    expect_named(run_ranks(_train, world, 60, point, victim, act, dying=[victim]), victim)


# --- at the k-th event of a step, whatever it is ---

EVENTS = ["_pre_forward", "_post_forward", "_current_gradients", "_publish", "_show_whole"]


def watch(model: Any, event: Act) -> None:
    """`event` runs where a step calls into Python: around gathers, before and after reductions, in backward."""

    def seen(method: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            event()
            result = method(*args, **kwargs)
            event()
            return result

        return wrapped

    for unit in units_in(model):
        for name in EVENTS[2:]:
            setattr(unit, name, seen(getattr(unit, name)))
        for module in unit.modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    hooks[key] = seen(hook)


class Countdown:
    def __init__(self, at: int, act: Act) -> None:
        self.left, self.act = at, act

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


def _at_event(k: int, victim: int) -> str | int:
    """Ends the victim at its k-th event; with k = 0 counts the events of a step."""
    model = build("", die)
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    countdown = Countdown(k, die if dist.get_rank() == victim else lambda: None)
    for i in range(2):
        step("", model, optimiser, die, i)
    watch(model, countdown)
    if k == 0:
        step("", model, optimiser, die, 2)
        return -countdown.left
    return survive(lambda: step("", model, optimiser, die, 2), model)


def test_a_step_has_events() -> None:
    events = run_ranks(_at_event, 2, 60, 0, -1)
    assert events[0] == events[1] > 20


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 3])
def test_a_dead_rank_is_named_at_every_event(world: int) -> None:
    events = run_ranks(_at_event, world, 60, 0, -1)[0]
    for k in range(1, events + 1):
        victim = k % world
        expect_named(run_ranks(_at_event, world, 60, k, victim, dying=[victim]), victim)


# --- at any moment ---


def _at_any_moment(seconds: float, victim: int) -> str:
    model = build("", die)
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    step("", model, optimiser, die, 0)
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()
    return survive(lambda: step("", model, optimiser, die, 1), model)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_a_rank_that_dies_at_any_moment(seed: int) -> None:
    world = 2 + seed % 3
    seconds, victim = random.Random(seed).uniform(0.05, 0.5), seed % world
    expect_named(run_ranks(_at_any_moment, world, 60, seconds, victim, dying=[victim]), victim)


# --- of those who wait for each other, and not for the dead ---


def _in_a_row() -> str:
    """Rank 1 fails by rank 0's death and closes its connections, one of them broken already; the rest wait for rank 1 only."""
    comm = make_process_group_comm(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    comm.all_reduce(torch.ones(1)).order_after()
    if comm.rank == 0:
        die()
    if comm.rank == 1:
        return survive(lambda: comm.all_reduce(torch.ones(1)).order_after(), None)
    return survive(lambda: comm.broadcast(torch.ones(1), root=1).order_after(), None)


def test_word_of_a_death_reaches_those_who_wait_for_others() -> None:
    expect_named(run_ranks(_in_a_row, 4, 60, dying=[0]), 0)


def _with_its_store() -> str:
    """Rank 0 takes the group's store along, as it does where init_process_group was given tcp:// or MASTER_ADDR."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True) if dist.get_rank() == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    store = host or dist.TCPStore("127.0.0.1", port[0])
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    del host, store
    return _in_a_row()


def test_a_rank_that_takes_the_store_along() -> None:
    said = run_ranks(_with_its_store, 3, 60, dying=[0])
    assert "late" not in said[1] + said[2]
    assert "rank 0 is gone" in said[1]
    assert "rank 0 is gone" in said[2] or "rank 1 is gone" in said[2]
    assert "store is gone too" in said[2]


# --- slow ranks ---


def _slow(seconds: float, victim: int) -> None:
    def shard(model: Any) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    twin = Twin(lambda: Stack(2), shard)
    watch(twin.model, lambda: time.sleep(seconds) if twin.rank == victim else None)
    twin.train(weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH), steps=1)
    time.sleep(3 if twin.rank == victim else 0)
    twin.train(weighted_loss, lambda step, rank: batch(step + 1, rank, 2, WIDTH), steps=1)
    state = full_state_dict(twin.model)
    for name, value in twin.oracle.state_dict().items():
        twin.same(name, state[name], value)


@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0), pytest.param(4, 2, marks=pytest.mark.long)])
def test_a_slow_rank_changes_nothing(world: int, victim: int) -> None:
    run_ranks(_slow, world, 60, 0.03, victim)
