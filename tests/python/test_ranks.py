"""The helper that runs ranks must itself be trustworthy: it names who failed and never hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, run_ranks


def _sum(value: float) -> float:
    t = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(t)
    return t.item()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(3)
    try:
        dist.barrier()
    except RuntimeError:
        return "noticed"
    return "missed"


def _die_unexpectedly() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_by_rank(world: int) -> None:
    want = float(sum(range(world)) + 5 * world)
    assert run_ranks(_sum, world, 60, 5.0) == [want] * world


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match="the reason") as failure:
        run_ranks(_raise_on, 2, 60, 1)
    assert failure.value.rank == 1
    assert isinstance(failure.value.__cause__, ValueError)
    assert run_ranks(_sum, 2, 60, 0.0) == [1.0, 1.0]


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 ended with exit code 3"):
        run_ranks(_die_unexpectedly, 2)


def test_ranks_that_may_die() -> None:
    assert run_ranks(_die_on, 3, 60, 2, dying=[2]) == ["noticed", "noticed", None]


def test_a_late_rank_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="still running: rank 1 of 2"):
        run_ranks(_sleep_on, 2, 2, 1)
    assert time.monotonic() - begin < 20
