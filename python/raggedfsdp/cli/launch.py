"""Starts the ranks on this machine, follows them, and ends all of them whatever happens."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from raggedfsdp import CommError, UsageError
from raggedfsdp.cli.rank import Failure, run_rank
from raggedfsdp.recipe import TrainOptions
from raggedfsdp.report import StepReport, TrainReport

_GRACE_S = 2.0  # after a first failure, for the rank that caused it to say so


class LocalRanks:
    """A context: ranks run inside it and none is left after it."""

    def __init__(self, options: TrainOptions, ranks: int, device: str) -> None:
        self._options = options
        self._ranks = ranks
        self._device = device
        self._folder = Path(tempfile.mkdtemp(prefix="raggedfsdp-"))
        self._processes: list[BaseProcess] = []
        self._running: dict[Connection, int] = {}
        self._last_step = 0
        self._keep_logs = False

    def __enter__(self) -> LocalRanks:
        # Forking costs one import of torch for all ranks instead of one each. Where a fork is unsafe (a GPU's driver, macOS's
        # libraries), ranks start afresh.
        forks = sys.platform == "linux" and self._device == "cpu"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: no rank hears Ctrl-C before it can ignore it
        try:
            for rank in range(self._ranks):
                self._start(context, rank)
        except BaseException:
            self._end()
            raise
        finally:
            signal.signal(signal.SIGINT, interrupt)
        return self

    def _start(self, context: Any, rank: int) -> None:
        events, ours = context.Pipe(duplex=False)
        place = (rank, self._ranks, self._device)
        process = context.Process(target=run_rank, args=(self._options, place, self._folder, ours), name=f"rank-{rank}")
        process.start()
        ours.close()  # so that the end of the rank is the end of the pipe
        self._processes.append(process)
        self._running[events] = rank

    def follow(self, on_step: Callable[[StepReport], None]) -> TrainReport:
        """Until every rank is done. The first to fail ends all, as the error that names the cause."""
        report: TrainReport | None = None
        while self._running:
            for events in wait(list(self._running)):
                event = self._receive(events)  # type: ignore[arg-type]
                if isinstance(event, Failure):
                    raise self._error(self._cause(event))
                if isinstance(event, StepReport):
                    self._last_step = event.step
                    on_step(event)
                report = event if isinstance(event, TrainReport) else report
        if report is None:
            raise CommError("rank 0 ended without a result")
        return report

    def _receive(self, events: Connection) -> StepReport | TrainReport | Failure | None:
        rank = self._running[events]
        try:
            event: StepReport | TrainReport | Failure | None = events.recv()
        except (EOFError, OSError):
            del self._running[events]
            process = self._processes[rank]
            process.join(_GRACE_S)
            return None if process.exitcode == 0 else Failure(rank, "died", self._how_it_died(process))
        return event

    def _how_it_died(self, process: BaseProcess) -> str:
        code = process.exitcode
        when = f"after step {self._last_step}" if self._last_step else "before the first step"
        if code is None or code >= 0:
            return f"ended with code {code} {when}"
        hint = "; if nobody did that, the machine ran out of memory" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name} {when}{hint}"

    def _cause(self, first: Failure) -> Failure:
        """Ranks fail because another failed, and often report sooner. One that died, or failed by itself, is the cause."""
        failures = [first]
        until = time.monotonic() + _GRACE_S
        while self._running and (left := until - time.monotonic()) > 0 and _weight(min(failures, key=_weight)) > 0:
            for events in wait(list(self._running), timeout=left):
                event = self._receive(events)  # type: ignore[arg-type]
                if isinstance(event, Failure) and event.kind == "died" and event.rank in {f.rank for f in failures}:
                    continue  # it has said more itself
                if isinstance(event, Failure):
                    failures.append(event)
        return min(failures, key=_weight)

    def _error(self, failure: Failure) -> Exception:
        if failure.of_input:
            return UsageError(failure.message)
        self._keep_logs = True
        log = self._folder / f"rank-{failure.rank}.log"
        what = failure.message if failure.kind == "died" else f"{failure.kind}: {failure.message}"
        return CommError(f"rank {failure.rank} {what}; all ranks are stopped, its output is in {log}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()  # a rank holds nothing that it would have to put in order
        for process in self._processes:
            process.join()
        for events in self._running:
            events.close()
        if not self._keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)


def _weight(failure: Failure) -> int:
    return 0 if failure.kind == "died" else 2 if failure.of_peer else 1


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
