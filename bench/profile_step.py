"""Where a rank's training step goes: compute, gathers, reductions, copies, waiting, the engine's own host time.

    python bench/profile_step.py --ranks 2 --precision fp32

Every moment of the main thread belongs to exactly one part, so the parts add up to the step. Waits are split at the moment when
the last rank started the collective: before it another rank was late, after it bytes were on their way. Means over steps and
ranks, under torch's profiler, which costs time itself: the step without it is printed too.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from engines import ENGINES, TITLES, Job, Trainer
from launch import spawn

PARTS = {
    "forward": "compute: operations in forward",
    "backward": "compute: operations in backward",
    "between": "autograd and modules, between operations",
    "gather copies": "gather: copies and casts",
    "reduce copies": "reduce: copies, casts, scaling",
    "gather transfer": "gather: waiting for bytes",
    "gather late": "gather: waiting for a late rank",
    "reduce transfer": "reduce: waiting for bytes",
    "reduce late": "reduce: waiting for a late rank",
    "engine": "the engine's host time",
    "update": "optimiser",
    "rest": "rest",
}
STARTS = {
    "ragged::start_gather": "gather",
    "ragged::start_reduce": "reduce",
    "ragged::start_usage": "usage",
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce",
}
WAITS = {"ragged::wait_gather": "gather", "ragged::wait_reduce": "reduce", "ragged::wait_usage": "usage"}
PHASES = ("forward", "backward", "update")
WAIT = "wait"  # the range around a Work's wait in Python, which FSDP2 uses


@dataclass
class Account:
    """One rank's steps. Times are microseconds of the machine's monotonic clock, so ranks can be compared."""

    parts: Counter[str] = field(default_factory=Counter)
    starts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    step_us: float = 0.0
    plain_us: float = 0.0
    main_cpu_us: float = 0.0
    other_cpu_us: float = 0.0
    steps: int = 0


def is_range(name: str) -> bool:
    return name.startswith(("ragged::", "FSDP::"))


def side_of(path: tuple[str, ...]) -> str:
    for name in reversed(path):
        if "gather" in name:
            return "gather"
        if "reduce" in name or name in ("ragged::sink", "FSDP::post_backward_accumulate"):
            return "reduce"
    return ""


def part_of(path: tuple[str, ...]) -> str:
    """Of the innermost range's own time; `path` leads to it from the step."""
    name = path[-1]
    inside = any(is_range(p) for p in path)
    if name.startswith(("aten::", "fsdp::")) or name in ("ragged::sink", "ragged::finish_reduce"):
        side = side_of(path)
        return f"{side} copies" if inside and side else "engine" if inside else path[1] if len(path) > 1 else "rest"
    if inside:
        return "engine"
    if len(path) == 1:
        return "rest"
    return "update" if path[1] == "update" else "between"


def walk(event: Any, path: tuple[str, ...], clock: float, account: Account) -> None:
    path = (*path, event.name)
    begin, end = event.time_range.start, event.time_range.end
    if side := STARTS.get(event.name):
        account.starts[side].append(clock + end)
    side = WAITS.get(event.name) or (event.name == WAIT and (side_of(path) or "gather"))
    if side:
        account.waits[side].append((clock + begin, clock + end))
        return
    own = end - begin
    for child in event.cpu_children:
        own -= child.time_range.end - child.time_range.start
        walk(child, path, clock, account)
    account.parts[part_of(path)] += own


def split_waits(accounts: list[Account]) -> None:
    """The k-th wait of a kind is for the k-th collective of that kind, on every rank."""
    for side in accounts[0].waits:
        counts = {len(times[side]) for a in accounts for times in (a.starts, a.waits)}
        if len(counts) != 1:
            raise SystemExit(f"profile: ranks started or awaited different numbers of {side} collectives: {counts}")
        last_start = [max(times) for times in zip(*(a.starts[side] for a in accounts), strict=True)]
        for account in accounts:
            for (begin, end), own, last in zip(account.waits[side], account.starts[side], last_start, strict=True):
                if end < own:
                    raise SystemExit(f"profile: a {side} was waited for before it started: they are not in one order")
                late = min(max(last - begin, 0.0), end - begin)
                part = "reduce" if side == "usage" else side
                account.parts[f"{part} late"] += late
                account.parts[f"{part} transfer"] += end - begin - late


def ranged(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return run


def mark_python(engine: str) -> None:
    """Ranges around what has none of its own."""
    if engine == "fsdp2":
        dist.Work.wait = ranged(dist.Work.wait, WAIT)  # type: ignore[method-assign]
        return
    from raggedfsdp._state import UnitState

    for name in ("_pre_forward", "_post_forward", "_current_gradients", "_publish", "_show_whole"):
        setattr(UnitState, name, ranged(getattr(UnitState, name), f"ragged::{name}"))


def phases(trainer: Trainer, tokens: torch.Tensor) -> None:
    with record_function("step"):
        with record_function("forward"):
            loss = trainer.forward(tokens[:, :-1], tokens[:, 1:])
        with record_function("backward"):
            trainer.backward(loss)
        with record_function("update"):
            trainer.update()


def timed(trainer: Trainer, tokens: torch.Tensor, steps: int) -> Iterator[tuple[float, float, float, float]]:
    """Begin, wall time, CPU time of this thread and of the process, in microseconds."""
    for _ in range(steps):
        dist.barrier()
        begin, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        phases(trainer, tokens)
        wall, thread, process = time.perf_counter() - begin, time.thread_time() - thread, time.process_time() - process
        yield 1e6 * begin, 1e6 * wall, 1e6 * thread, 1e6 * process


def measure(job: Job, engine: str, warmup: int, steps: int) -> list[Account]:
    mark_python(engine)
    trainer, tokens = ENGINES[engine](job), job.tokens(dist.get_rank())
    list(timed(trainer, tokens, warmup))
    account = Account(steps=steps)
    account.plain_us = statistics.mean(wall for _, wall, _, _ in timed(trainer, tokens, steps))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        clocks = list(timed(trainer, tokens, steps))
    roots = sorted((e for e in profiler.events() if e.name == "step"), key=lambda e: e.time_range.start)
    assert len(roots) == steps, "one range per step"
    for root, (begin, _, main_cpu, all_cpu) in zip(roots, clocks, strict=True):
        account.step_us += root.time_range.end - root.time_range.start
        account.main_cpu_us += main_cpu
        account.other_cpu_us += all_cpu - main_cpu
        walk(root, (), begin - root.time_range.start, account)
    accounts: list[Any] = [None] * job.ranks
    dist.all_gather_object(accounts, account)
    split_waits(accounts)
    return accounts


def mean_ms(accounts: list[Account], value: Callable[[Account], float]) -> float:
    return statistics.mean(value(a) / a.steps for a in accounts) / 1e3


def show(job: Job, results: dict[str, list[Account]]) -> None:
    print(f"{job.ranks} ranks, {job.precision}; ms per step, mean over ranks\n")
    print(f"{'':42}" + "".join(f"{TITLES[engine]:>18}" for engine in results))
    totals = {engine: mean_ms(accounts, lambda a: a.step_us) for engine, accounts in results.items()}

    def row(title: str, value: Callable[[Account], float]) -> None:
        cells = ((engine, mean_ms(accounts, value)) for engine, accounts in results.items())
        print(f"{title:42}" + "".join(f"{ms:10.1f} {100 * ms / totals[engine]:5.1f} %" for engine, ms in cells))

    for part, title in PARTS.items():
        row(title, lambda a: a.parts[part])  # noqa: B023  (called at once)
    row("sum of the parts", lambda a: sum(a.parts.values()))
    row("step", lambda a: a.step_us)
    print()
    row("step without the profiler", lambda a: a.plain_us * a.steps)
    row("CPU time of the main thread", lambda a: a.main_cpu_us)
    row("CPU time of other threads (transport)", lambda a: a.other_cpu_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--engines", nargs="+", choices=["raggedfsdp", "fsdp2"], default=["raggedfsdp", "fsdp2"])
    parser.add_argument("--width", type=int, default=Job.width)
    parser.add_argument("--layers", type=int, default=Job.layers)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    job = Job(options.ranks, options.precision, options.width, options.layers)
    os.environ["KINETO_LOG_LEVEL"] = "6"  # it reports every start and stop
    results = {e: spawn(job.ranks, measure, job, e, options.warmup, options.steps) for e in options.engines}
    show(job, results)


if __name__ == "__main__":
    main()
