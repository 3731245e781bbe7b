"""A training step of this engine beside PyTorch's FSDP2: same model, same ranks, same backend, in one run.

    python bench/step.py --ranks 2 --precision fp32

Time: both models live in the same processes and take turns, step by step; the ratio is that of the medians. Memory: each engine
trains alone in fresh processes; the ratio is that of the peaks of resident memory above the processes' size before the model
was built. Absolute times on a shared machine mean little; the ratios are what counts.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from transformer import Shape

ENGINES = ("raggedfsdp", "fsdp2")


def wrap(engine: str, model: torch.nn.Module, precision: str) -> torch.nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard: Callable[..., Any]
    if engine == "raggedfsdp":
        from raggedfsdp import fully_shard as shard
    else:
        from torch.distributed.fsdp import fully_shard as shard
    for block in model.blocks:  # type: ignore[union-attr]
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    return model


class Run:
    """One engine's model, optimiser and data on this rank."""

    def __init__(self, engine: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        shape = Shape(width=options.width, layers=options.layers)
        self.model = wrap(engine, shape.build(), options.precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.tokens = torch.randint(0, shape.vocabulary, (options.batch, options.sequence + 1), generator=generator)

    def step(self) -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def resident_peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def measure_time(options: argparse.Namespace) -> dict[str, Any]:
    runs = {engine: Run(engine, options) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for step in range(options.warmup + options.steps):
        # Who goes first changes, so that neither always follows the other's cache misses.
        for engine in ENGINES if step % 2 == 0 else reversed(ENGINES):
            seconds = runs[engine].step()
            if step >= options.warmup:
                times[engine].append(seconds)
    return {engine: statistics.median(t) for engine, t in times.items()}


def measure_memory(options: argparse.Namespace, engine: str) -> int:
    from torch.distributed.fsdp import fully_shard  # noqa: F401  (both engines pay for the imports first)

    import raggedfsdp  # noqa: F401

    before = resident_peak_bytes()
    run = Run(engine, options)
    # The unsharded model's own construction would hide the steps.
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    for _ in range(4):
        run.step()
    return resident_peak_bytes() - before


def worker(rank: int, store: str, options: argparse.Namespace, engine: str | None, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    value = measure_time(options) if engine is None else measure_memory(options, engine)
    if rank == 0:
        result.put(value)
    dist.barrier()
    dist.destroy_process_group()


def spawn(options: argparse.Namespace, engine: str | None) -> Any:
    result = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (os.path.join(folder, "store"), options, engine, result), nprocs=options.ranks)
    return result.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times = spawn(options, None)
    peaks = {engine: spawn(options, engine) for engine in ENGINES}
    report = {
        "ranks": options.ranks,
        "precision": options.precision,
        "step_ms": {engine: round(1e3 * s, 1) for engine, s in times.items()},
        "peak_mb": {engine: round(b / 1e6) for engine, b in peaks.items()},
        "speed_ratio": round(times["fsdp2"] / times["raggedfsdp"], 3),
        "memory_ratio": round(peaks["raggedfsdp"] / peaks["fsdp2"], 3),
    }
    if options.json:
        json.dump(report, sys.stdout)
        print()
        return
    print(f"{options.ranks} ranks, {options.precision}: step (ms) {report['step_ms']}, peak (MB) {report['peak_mb']}")
    print(f"speed: {report['speed_ratio']} x FSDP2's    peak memory: {report['memory_ratio']} x FSDP2's")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
