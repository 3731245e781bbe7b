"""One rank: joins the others, trains, and tells the process that started it how it goes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from raggedfsdp import CommError, UsageError
from raggedfsdp.recipe import Place, TrainOptions
from raggedfsdp.training import train

COLLECTIVE_LIMIT = timedelta(minutes=5)  # a rank that waits longer for the others fails


@dataclass(frozen=True)
class Failure:
    rank: int
    kind: str  # the exception's type
    message: str
    of_input: bool = False  # every rank says the same
    of_peer: bool = False  # another rank is the cause


def run_rank(options: TrainOptions, place: tuple[int, int, str], folder: Path, events: Connection) -> None:
    """The body of a process that `LocalRanks` started. Sends StepReports, then a TrainReport or a Failure."""
    rank, ranks, device = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    _redirect_output(folder / f"rank-{rank}.log")
    try:
        first = rank == 0
        report = train(options, _join_local(rank, ranks, device, folder), events.send if first else lambda step: None)
        leave()
        events.send(report if first else None)
    except BaseException as e:
        traceback.print_exc()
        events.send(_failure(rank, e))
        sys.stderr.flush()
        os._exit(1)  # no destructor may wait for ranks that are gone


def join_torchrun(device: str) -> Place:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place(rank, ranks, _enter(device, int(os.environ.get("LOCAL_RANK", rank))))
    dist.init_process_group(dist.get_default_backend_for_device(place.device), timeout=COLLECTIVE_LIMIT)
    return place


def leave() -> None:
    """Nobody closes its connections while another still reads from them."""
    dist.barrier()
    dist.destroy_process_group()


def _join_local(rank: int, ranks: int, device: str, folder: Path) -> Place:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # the host's own name may resolve to an address that nobody can reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    place = Place(rank, ranks, _enter(device, rank))
    store = dist.FileStore(str(folder / "store"), ranks)
    backend = dist.get_default_backend_for_device(place.device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_LIMIT)
    return place


def device_of(name: str, index: int) -> torch.device:
    """The device of the machine's rank `index`. Initialises nothing: a process that does so cannot fork."""
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return torch.device("cpu")
        count = torch.get_device_module(device.type).device_count()
    except (RuntimeError, AttributeError) as e:
        raise UsageError(f"--device {name}: torch {torch.__version__} has no such device to train on") from e
    if index >= count:
        raise UsageError(f"--device {name}: each rank needs its own, and this machine has {count}, not {index + 1}")
    return torch.device(device.type, index)


def _enter(name: str, index: int) -> torch.device:
    device = device_of(name, index)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def _failure(rank: int, error: BaseException) -> Failure:
    lines = str(error).splitlines() or [""]
    peer = isinstance(error, (CommError, dist.DistError)) or (type(error) is RuntimeError and "gloo" in str(error))
    return Failure(rank, type(error).__name__, lines[0], of_input=isinstance(error, UsageError), of_peer=peer)


def _end_with_parent() -> None:
    """However the parent ends. The thread is portable; the kernel's signal also ends a rank that holds the GIL."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _redirect_output(log: Path) -> None:
    """Four ranks on one terminal are unreadable; what they print is kept for `Failure`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A fork shares the parent's objects, which may be a terminal that draws a progress bar.
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
