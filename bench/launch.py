"""Ranks as processes of this machine, over gloo, one thread each."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns on rank 0."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        mp.spawn(_rank, (ranks, f"{folder}/store", result, work, args), nprocs=ranks)
        return torch.load(result, weights_only=False)


def _rank(rank: int, ranks: int, store: str, result: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns its peers at every collective, which takes time
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    value = work(*args)
    if rank == 0:
        torch.save(value, result)
    dist.barrier()
    # Not the interpreter's own end: a thread of gloo's that lets go of a tensor meanwhile aborts the process.
    os._exit(0)
