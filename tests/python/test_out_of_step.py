"""Ranks that do not do the same: named in debug mode, agreed on when something is wrapped, never silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raggedfsdp import _C, Granularity, MixedPrecisionPolicy, UsageError, fully_shard
from raggedfsdp.comm import debug_limit, wrap_comms
from ranks import run_ranks

LIMIT = timedelta(seconds=4)


def checked(comm: _C.Comm) -> _C.Comm:
    return _C.make_checked_comm(comm, LIMIT)


def blocks(count: int = 3) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    with wrap_comms(checked):
        for block in model:
            fully_shard(block)
        return fully_shard(model)


def three_against_two_forwards(rank: int) -> None:
    model, x = blocks(), torch.ones(2, 8)
    for _ in range(3 if rank == 1 else 2):
        y = model(x)
    y.sum().backward()


def a_unit_skipped(rank: int) -> None:
    model, x = blocks(), torch.ones(2, 8)
    h = model[0](x)
    if rank != 1:
        h = model[1](h)
    model[2](h).sum().backward()


def a_unit_skipped_in_backward(rank: int) -> None:
    model, x = blocks(), torch.ones(2, 8)
    h = model[0](x)
    y = model[2](model[1](h))
    (h if rank == 1 else y).sum().backward()


def inputs_of_a_frozen_unit_differ(rank: int) -> None:
    model, x = blocks(1), torch.ones(2, 8, requires_grad=rank != 1)
    model.requires_grad_(False)
    (model(x).sum() + torch.zeros((), requires_grad=True)).backward()
    with torch.no_grad():
        model(x)


def one_gathers_alone(rank: int) -> None:
    model = blocks()
    if rank == 0:
        time.sleep(LIMIT.total_seconds() + 1)
    model[0](torch.ones(2, 8))


def outcome(case: Callable[[int], None], together: bool = True) -> tuple[str, str, float]:
    begin = time.monotonic()
    kind, text = "", ""
    try:
        case(dist.get_rank())
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    took = time.monotonic() - begin
    if together:
        dist.barrier()
    return kind, text, took


def several(cases: list[Callable[[int], None]]) -> list[tuple[str, str, float]]:
    return [outcome(case) for case in cases]


NAMED = {
    three_against_two_forwards: [
        "gather in forward",
        "gather in backward",
        "rank 1 is at unit '0'",
        "ranks 0, 2 are at unit '2'",
    ],
    a_unit_skipped: ["ranks 0, 2 are at unit '1', bucket 0: gather in forward", "rank 1 is at unit '2', bucket 0: gather in f"],
    a_unit_skipped_in_backward: ["ranks 0, 2 are at unit '2', bucket 0: gather in backward", "rank 1 is at unit '0', bucket 0"],
    inputs_of_a_frozen_unit_differ: ["ranks 0, 2 are at", "rank 1 is at", "gather in backward", "gather in forward"],
}


def test_out_of_step_is_named_on_every_rank() -> None:
    for outcomes in run_ranks(several, 3, 60, list(NAMED)):
        for (case, parts), (kind, text, took) in zip(NAMED.items(), outcomes, strict=True):
            assert kind == "CommError", f"{case.__name__}: {kind} {text}"
            assert took < LIMIT.total_seconds() + 5
            missing = [part for part in parts if part not in text]
            assert not missing, f"{case.__name__}: {missing} not in: {text}"


def alone() -> tuple[str, str, float]:
    return outcome(one_gathers_alone, together=False)


def test_who_waits_alone_learns_where_it_is_and_for_whom() -> None:
    waiting, late = run_ranks(alone, 2, 60, dying=(1, 0))[::-1]  # the group ends with it: new processes for the next test
    assert waiting[0] == late[0] == "CommError"
    assert "this rank is at unit '0', bucket 0: gather in forward" in waiting[1]
    assert "rank 0" in waiting[1]
    assert waiting[2] < LIMIT.total_seconds() + 5
    assert "rank 1" in late[1]


def slow_rank() -> bool:
    model, x = blocks(), torch.ones(2, 8)
    if dist.get_rank() == 1:
        time.sleep(1.5)
    model(x).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def test_a_slow_rank_is_no_fault() -> None:
    assert run_ranks(slow_rank, 2, 60) == [True, True]


# --- what is wrapped ---


def another_shape(rank: int) -> None:
    fully_shard(nn.Linear(8, 8 + (rank == 1)))


def another_granularity(rank: int) -> None:
    fully_shard(
        nn.Linear(8, 8),
        orig_param_policy=lambda name, shape: Granularity.rows(1 + rank % 2) if len(shape) > 1 else Granularity.elements(),
    )


def another_dtype(rank: int) -> None:
    fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank == 1 else None))


def frozen_here_only(rank: int) -> None:
    module = nn.Linear(8, 8)
    module.weight.requires_grad_(rank != 1)
    fully_shard(module)


def a_policy_that_fails(rank: int) -> None:
    def policy(name: str, shape: torch.Size) -> Granularity:
        if rank == 1:
            raise KeyError(name)
        return Granularity.elements()

    fully_shard(nn.Linear(8, 8), orig_param_policy=policy)


def wrapped_twice(rank: int) -> None:
    module = nn.Linear(8, 8)
    fully_shard(module)
    fully_shard(module if rank == 1 else nn.Linear(8, 8))


def a_module_list(rank: int) -> None:
    module = nn.Linear(8, 8)
    fully_shard(nn.ModuleList([module]) if rank == 1 else module)


def bad_costs(rank: int) -> None:
    fully_shard(nn.Linear(8, 8), max_buckets=-1 if rank == 1 else 1)


AGREED = {
    another_shape: "rank 0 has 'parameter weight (8, 8) Float, elements', rank 1 has 'parameter weight (9, 8) Float, elements'",
    another_granularity: "rank 1 has 'parameter weight (8, 8) Float, rows(2)'",
    another_dtype: "rank 1 has 'param_dtype BFloat16",
    frozen_here_only: "rank 1 has 'parameter weight (8, 8) Float frozen",
    a_policy_that_fails: "on rank 1: 'weight'",
    wrapped_twice: "on rank 1: fully_shard: FSDPLinear is wrapped already",
    a_module_list: "on rank 1: fully_shard: ModuleList has no forward",
    bad_costs: "on rank 1: fully_shard: max_buckets is -1",
}


def test_ranks_that_wrap_differently_all_raise() -> None:
    outcomes = run_ranks(several, 3, 60, list(AGREED))
    for i, (case, part) in enumerate(AGREED.items()):
        for rank, came in enumerate(outcomes):
            kind, text, _ = came[i]
            if rank != 1 or "on rank 1" not in part:
                assert kind == "UsageError", f"{case.__name__} on rank {rank}: {kind} {text}"
                assert part in text, f"{case.__name__} on rank {rank}: {text}"
            else:
                assert kind, f"{case.__name__}: nothing was raised on the rank at fault"


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("0", None), ("1", 10.0), ("2.5", 2.5)])
def test_debug_mode_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None) -> None:
    monkeypatch.setenv("RAGGEDFSDP_DEBUG", text)
    limit = debug_limit()
    assert (limit.total_seconds() if limit else None) == seconds


@pytest.mark.parametrize("text", ["yes", "-1", "1s"])
def test_debug_mode_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RAGGEDFSDP_DEBUG", text)
    with pytest.raises(UsageError, match=f"RAGGEDFSDP_DEBUG is '{text}'"):
        debug_limit()
