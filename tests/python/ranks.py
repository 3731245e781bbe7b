"""Distributed tests: run a function on N processes, one rank each, over gloo on loopback.

    def body(numel: int) -> float: ...        # module level: it travels by name; torch.distributed is initialised

    def test_it() -> None:
        sums = run_ranks(body, 2, 60, 1000)   # results by rank

Processes are kept between calls (importing torch takes seconds); after a failure they are replaced. The default process
group lives as long as they do. Only processes started here are ever killed.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GROUP_TIMEOUT_S = 30


class RankFailed(Exception):
    """A rank raised, died or was late. `rank` names it; the cause is its exception, where that could be pickled."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def run_ranks(fn: Callable[..., Any], world: int, timeout_s: float = 60, *args: Any, dying: Collection[int] = ()) -> list[Any]:
    """fn(*args) on every rank; the results by rank. The first failure is raised here with its traceback.

    Ranks in `dying` are expected to end their process; their result is None.
    """
    return _pool(world).run(fn, args, timeout_s, frozenset(dying))


@functools.cache
def _pool(world: int) -> _Pool:
    return _Pool(world)


@dataclass
class _Worker:
    process: Any  # of the forkserver context
    pipe: Connection


class _Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self.workers: list[_Worker] = []
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, dying: frozenset[int]) -> list[Any]:
        if not self.workers:
            self._start()
        try:
            results = self._call(fn, args, timeout_s, dying)
            if not dying:
                self._call(_barrier, (), timeout_s)
        except BaseException:
            self._stop()
            raise
        if dying:
            self._stop()
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "numpy"])
        handle, store = tempfile.mkstemp(dir=self.folder.name)
        os.close(handle)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, self.world, store), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours))

    def _stop(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        self.workers.clear()

    def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, dying: frozenset[int] = frozenset()
    ) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            worker.pipe.send((fn, args))
        results: list[Any] = [None] * self.world
        waiting = set(range(self.world))
        while waiting:
            ready = wait([self.workers[r].pipe for r in waiting], deadline - time.monotonic())
            if not ready:
                late = ", ".join(map(str, sorted(waiting)))
                raise RankFailed(min(waiting), f"after {timeout_s} s still running: rank {late} of {self.world}")
            for rank in sorted(waiting):
                if self.workers[rank].pipe in ready:
                    results[rank] = self._result(rank, rank in dying)
                    waiting.remove(rank)
        return results

    def _result(self, rank: int, may_die: bool) -> Any:
        try:
            ok, value, text = self.workers[rank].pipe.recv()
        except (EOFError, ConnectionResetError):
            self.workers[rank].process.join()
            if may_die:
                return None
            code = self.workers[rank].process.exitcode
            raise RankFailed(rank, f"rank {rank} of {self.world} ended with exit code {code}") from None
        if ok:
            return value
        self._blame_the_dead()
        raise RankFailed(rank, f"on rank {rank} of {self.world}:\n{text}") from value

    def _blame_the_dead(self) -> None:
        """A rank that fails because another one died often reports first."""
        dead = wait([worker.process.sentinel for worker in self.workers], timeout=0.2)
        for rank, worker in enumerate(self.workers):
            if worker.process.sentinel in dead:
                worker.process.join()
                raise RankFailed(rank, f"rank {rank} of {self.world} ended with exit code {worker.process.exitcode}")


def _work(pipe: Connection, rank: int, world: int, store_path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # the function's module does not import here
            pipe.send((False, None, "".join(traceback.format_exception(error))))
            continue
        pipe.send(_answer(*job))


def _answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any, str]:
    import torch

    torch.manual_seed(0)
    try:
        return True, fn(*args), ""
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return False, _picklable(error), text


def _barrier() -> None:
    """Between tests: a collective left over on one rank shows here, not in the next test."""
    import torch.distributed as dist

    dist.barrier()


def _picklable(error: BaseException) -> BaseException | None:
    import pickle

    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy if isinstance(copy, BaseException) else None
