"""Runs cases of the stress test on ranks that are processes, many to a call."""

from __future__ import annotations

import faulthandler
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from ranks import RankFailed, run_ranks
from stress_actions import perform
from stress_cases import Case, make_case
from stress_twin import StressTwin, TooLarge

CASE_LIMIT_S = 90  # well above the process group's own limit, so that a collective that never comes is named first


def note(progress: Path, text: str) -> None:
    new = progress.with_suffix(".new")
    new.write_text(text)
    new.replace(progress)  # a rank may be killed at any time


def run_case(case: Case, progress: Path) -> str:
    """On every rank. How the case ended: "done", or "cut" where numbers grew too large; failures raise."""
    note(progress, f"{case.seed}\nbuilding")
    with open(f"{progress}.trace", "w") as trace:
        faulthandler.enable(trace)
        faulthandler.dump_traceback_later(CASE_LIMIT_S, file=trace)
        try:
            twin = StressTwin(case)
            for i, action in enumerate(case.actions):
                note(progress, f"{case.seed}\naction {i}: {action}")
                perform(twin, action.kind, action.has)
        except TooLarge:
            return "cut"
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
    return "done"


def run_cases(cases: list[Case], folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    progress = Path(folder) / str(dist.get_rank())
    return [run_case(case, progress) for case in cases]


@dataclass
class Failed:
    case: Case
    where: str  # the action under way
    text: str

    def __str__(self) -> str:
        return f"{self.case}\nfailed at {self.where}\n{self.text}"


@dataclass
class Outcome:
    done: int = 0
    cut: int = 0
    failures: list[Failed] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.done} cases done, {self.cut} cut short, {len(self.failures)} failed"


def run(cases: Iterable[Case], world: int) -> Outcome:
    """All cases; after one that fails, the ranks are replaced and the next one runs."""
    outcome = Outcome()
    todo = list(cases)
    while todo:
        with tempfile.TemporaryDirectory(prefix="stress-") as folder:
            try:
                ends = run_ranks(run_cases, world, CASE_LIMIT_S + 5 * len(todo), todo, folder)[0]
            except RankFailed as failure:
                at, failed = _diagnose(todo, failure, Path(folder))
                outcome.failures.append(failed)
                ends = ["done"] * at  # or cut
                todo = todo[at + 1 :]
            else:
                todo = []
        outcome.done += ends.count("done")
        outcome.cut += ends.count("cut")
    return outcome


def _diagnose(cases: list[Case], failure: RankFailed, folder: Path) -> tuple[int, Failed]:
    progress = [path.read_text().split("\n", 1) for path in sorted(folder.iterdir()) if path.suffix == ""]
    seeds = [case.seed for case in cases]
    if not progress:
        return 0, Failed(cases[0], "the start", str(failure))
    # A rank may be one case ahead of the one that failed.
    at = min(seeds.index(int(seed)) for seed, _ in progress)
    where = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(progress))
    traces = [path.read_text() for path in sorted(folder.glob("*.trace"))]
    return at, Failed(cases[at], where, "\n".join([str(failure), *(t for t in traces if t)]))


BATCH = 10


def sweep(first_seed: int, worlds: list[int], seconds: float, cases: int | None = None) -> Outcome:
    """Cases of consecutive seeds, on each world in turn, until the time is up; prints what fails at once."""
    end = time.monotonic() + seconds
    total = Outcome()
    seed = first_seed
    while time.monotonic() < end and (cases is None or seed - first_seed < cases):
        for world in worlds:
            outcome = run((make_case(s, world) for s in range(seed, seed + BATCH)), world)
            total.done += outcome.done
            total.cut += outcome.cut
            total.failures += outcome.failures
            for failed in outcome.failures:
                print(
                    f"\nFAILED: python tests/python/stress.py --seed {failed.case.seed} --world {world}\n{failed}", flush=True
                )
        seed += BATCH
    print(f"seeds {first_seed} to {seed - 1}, worlds {worlds}: {total}", flush=True)
    return total
