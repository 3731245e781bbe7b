"""How fast the comm's verbs are over a torch process group, beside that group's own collectives, in one run.

    python bench/comm_bench.py --ranks 2 4 --mb 0.004 1 16 64

Every line alternates both routes on the same buffers and prints the best and the median time of each, their ratio, and the
memory that one call needs beyond its tensors. Times are of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raggedfsdp import _C

Call = Callable[[_C.Comm], _C.Work]


def verbs(size: int, rank: int, numel: int, dtype: torch.dtype) -> dict[str, Call]:
    buffer = torch.zeros(numel, dtype=dtype)
    other = torch.zeros(numel, dtype=dtype)
    part = numel // size
    own = buffer[rank * part : (rank + 1) * part]
    counts = [part] * size
    return {
        "all_gather": lambda c: c.all_gather(buffer),
        "reduce_scatter": lambda c: c.reduce_scatter(buffer, own),
        "all_reduce": lambda c: c.all_reduce(buffer),
        "broadcast": lambda c: c.broadcast(buffer, 0),
        "all_to_all": lambda c: c.all_to_all(other, buffer, counts, counts),
    }


def slowest(value: float) -> float:
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def seconds(comm: _C.Comm, call: Call) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call(comm).order_after()
    return slowest(time.perf_counter() - begin)


def resident_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def extra_mb(comm: _C.Comm, call: Call) -> float:
    """Peak resident memory during one call, beyond what was resident before it."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_kb("VmRSS")
    call(comm).order_after()
    return slowest(max(0, resident_kb("VmHWM") - before) / 1024)


def measure(routes: dict[str, _C.Comm], call: Call, repeats: int) -> dict[str, dict[str, float]]:
    memory = {name: extra_mb(comm, call) for name, comm in routes.items()}
    times: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repeats):
        for name, comm in routes.items():
            times[name].append(seconds(comm, call) * 1e3)
    return {n: {"best_ms": min(t), "median_ms": statistics.median(t), "extra_mb": memory[n]} for n, t in times.items()}


def run(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    routes = {
        "ours": _C.make_process_group_comm(group.group_name),
        "gloo": _C.make_process_group_comm(group.group_name, _C.GroupRoute.COLLECTIVES),
    }
    dtype = getattr(torch, options.dtype)
    for mb in options.mb:
        numel = max(1, int(mb * 2**20) // dtype.itemsize // size) * size
        for verb, call in verbs(size, rank, numel, dtype).items():
            result = measure(routes, call, options.repeats)
            if rank == 0:
                report(options, {"ranks": size, "mb": mb, "verb": verb, **result})
    dist.barrier()
    routes.clear()
    dist.destroy_process_group()


def report(options: argparse.Namespace, row: dict[str, Any]) -> None:
    ours, gloo = row["ours"], row["gloo"]
    print(
        f"{row['ranks']} | {row['mb']:g} | {row['verb']} | {ours['best_ms']:.2f} / {ours['median_ms']:.2f}"
        f" | {gloo['best_ms']:.2f} / {gloo['median_ms']:.2f} | {gloo['best_ms'] / ours['best_ms']:.2f} /"
        f" {gloo['median_ms'] / ours['median_ms']:.2f} | {ours['extra_mb']:.1f} | {gloo['extra_mb']:.1f}",
        flush=True,
    )
    if options.json:
        with open(options.json, "a") as f:
            f.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=float, nargs="+", default=[0.004, 1, 16, 64], help="size of the whole buffer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="append one JSON object a line to this file")
    options = parser.parse_args()
    print("ranks | MB | verb | ours ms, best / median | gloo ms, best / median | gloo : ours | ours extra MB | gloo extra MB")
    print("--- | --- | --- | --- | --- | --- | --- | ---")
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:  # the store deletes its own file
            mp.spawn(run, args=(size, f"{folder}/store", options), nprocs=size)


if __name__ == "__main__":
    sys.exit(main())
