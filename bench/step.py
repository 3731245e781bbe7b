"""A training step of this engine beside FSDP2, FSDP1, DDP and DeepSpeed ZeRO-3: same model, data and backend, in one run.

    python bench/step.py --ranks 2 --precision fp32 [--peers fsdp2,deepspeed]

Time: all models live in the same processes and take turns, step by step; the order rotates; a step is as long as its slowest
rank's; the ratio is that of the medians. CPU time is a rank's, of all its threads: other load on the machine disturbs it less.
Memory: each engine trains alone in fresh processes; the ratio is that of the peaks of resident memory above the process's size
before the model was built. "Live" is the same with a malloc that gives what is freed back to the system at once: what an engine
holds, without the holes that it leaves in malloc's heap. Before anything is measured, every engine's first losses must equal
those of the unsharded model that sees all ranks' batches. Absolute times on a shared machine mean little: ratios count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines import ENGINES, ONLY_IF_ASKED, TITLES, Job, Trainer, missing, unsharded
from launch import spawn

OURS = "raggedfsdp"
CHECKED_STEPS = 4
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # of the unsharded model's in fp32; gradients that are not reduced are 2e-2 off


def unsharded_losses(job: Job) -> list[float]:
    """Of one process that sees the batches of all ranks."""
    trainer = unsharded(job)
    tokens = torch.cat([job.tokens(rank) for rank in range(job.ranks)])
    return [trainer.step(tokens).item() for _ in range(CHECKED_STEPS)]


def first_losses(trainer: Trainer, job: Job) -> list[float]:
    """The means over ranks, the same on every rank."""
    losses = torch.stack([trainer.step(job.tokens(dist.get_rank())).double() for _ in range(CHECKED_STEPS)])
    dist.all_reduce(losses)
    return (losses / job.ranks).tolist()


def complaint(engine: str, job: Job, came: Sequence[float], expected: Sequence[float]) -> str:
    off, allowed = off_by(came, expected), TOLERANCE[job.precision]
    if off <= allowed:
        return ""
    return (
        f"{TITLES[engine]} does not train what the others train, so nothing was measured: its first losses are {came}, the "
        f"unsharded model's are {expected}; they differ by {off:.0e}, at most {allowed:.0e} is right"
    )


def off_by(came: Sequence[float], expected: Sequence[float]) -> float:
    """Relative to the first loss: later ones may be small, and bf16's rounding adds up."""
    return max(abs(c - e) for c, e in zip(came, expected, strict=True)) / abs(expected[0])


def measure_time(job: Job, engines: Sequence[str], expected: Sequence[float], warmup: int, steps: int) -> dict[str, Any]:
    trainers = {engine: ENGINES[engine](job) for engine in engines}
    losses = {engine: first_losses(trainer, job) for engine, trainer in trainers.items()}
    if complaints := [text for engine in engines if (text := complaint(engine, job, losses[engine], expected))]:
        return {"complaints": complaints}
    tokens = job.tokens(dist.get_rank())
    wall, cpu = torch.zeros(2, len(engines), warmup + steps, dtype=torch.float64)
    for step in range(warmup + steps):
        for turn in range(len(engines)):
            # Who goes first changes, so that nobody always follows the same other's cache misses.
            index = (turn + step) % len(engines)
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            trainers[engines[index]].step(tokens)
            wall[index, step], cpu[index, step] = time.perf_counter() - begin, time.process_time() - cpu_begin
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {
        engine: {
            "step_s": statistics.median(wall[i, warmup:].tolist()),
            "cpu_s": statistics.median(cpu[i, warmup:].tolist()) / job.ranks,
            "loss_off": off_by(losses[engine], expected),
        }
        for i, engine in enumerate(engines)
    }


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure_memory(job: Job, engine: str) -> int:
    # A first model, for what an engine imports and sets up once.
    small = Job(job.ranks, job.precision, width=64, layers=1, batch=1, sequence=8)
    ENGINES[engine](small).step(small.tokens(dist.get_rank()))
    gc.collect()
    before = resident_bytes("VmRSS")
    trainer = ENGINES[engine](job)
    tokens = job.tokens(dist.get_rank())
    # The unsharded model's own construction would hide the steps.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(4):
        trainer.step(tokens)
    peak = torch.tensor(resident_bytes("VmHWM") - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


@contextlib.contextmanager
def malloc_without_holes() -> Iterator[None]:
    """In processes started meanwhile, what is larger than this is a mapping of its own."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def measure(job: Job, peers: Sequence[str], warmup: int, steps: int) -> dict[str, Any]:
    engines = [OURS, *peers]
    expected = spawn(1, unsharded_losses, job)
    results = spawn(job.ranks, measure_time, job, engines, expected, warmup, steps)
    if "complaints" in results:
        raise SystemExit("\n".join(results["complaints"]))
    for engine in engines:
        results[engine]["peak_bytes"] = spawn(job.ranks, measure_memory, job, engine)
        with malloc_without_holes():
            results[engine]["live_bytes"] = spawn(job.ranks, measure_memory, job, engine)
    ours = results[OURS]
    for result in results.values():
        result["speed_ratio"] = result["step_s"] / ours["step_s"]
        result["memory_ratio"] = ours["peak_bytes"] / result["peak_bytes"]
        result["live_ratio"] = ours["live_bytes"] / result["live_bytes"]
    return {"ranks": job.ranks, "precision": job.precision, "engines": results}


def cell(result: dict[str, Any] | None) -> str:
    return f"{result['speed_ratio']:.2f} / {result['memory_ratio']:.2f} / {result['live_ratio']:.2f}" if result else "-"


def show(job: Job, results: dict[str, Any], absent: Sequence[str]) -> None:
    parameters = sum(p.numel() for p in job.build().parameters()) / 1e6
    off = max(result["loss_off"] for result in results.values())
    print(f"{job.ranks} ranks, {job.precision}, {parameters:.1f} M parameters, batch {job.batch} x {job.sequence} per rank")
    print(f"losses of {CHECKED_STEPS} steps equal the unsharded model's within {off:.0e}")
    print(f"\n{'':16} {'step ms':>9} {'our speed':>10} {'CPU ms':>8} {'peak MB':>8} {'ours':>7} {'live MB':>8} {'ours':>7}")
    for engine, r in results.items():
        ratios = ("speed_ratio", "memory_ratio", "live_ratio")
        speed, memory, live = (f"{r[key]:.2f} x" if engine != OURS else "" for key in ratios)
        times = f"{1e3 * r['step_s']:9.1f} {speed:>10} {1e3 * r['cpu_s']:8.1f}"
        print(f"{TITLES[engine]:16} {times} {r['peak_bytes'] / 1e6:8.0f} {memory:>7} {r['live_bytes'] / 1e6:8.0f} {live:>7}")
    for engine in absent:
        print(f"{TITLES[engine]:16} {missing(engine)}")
    if job.precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print("\nThis CPU has no bf16 instructions: its bf16 matmuls are many times slower than in fp32 and hide all else.")
    cells = [cell(results.get(engine)) for engine in ENGINES if engine != OURS and engine not in ONLY_IF_ASKED]
    print(f"\nfor docs/benchmarks.md: | {job.ranks} | {job.precision} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [engine for engine in ENGINES if engine != OURS]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--peers", help=f"of {','.join(peers)}; by default all that are installed")
    parser.add_argument("--width", type=int, default=Job.width)
    parser.add_argument("--layers", type=int, default=Job.layers)
    parser.add_argument("--batch", type=int, default=Job.batch, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=Job.sequence)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=1, help=f"after the {CHECKED_STEPS} steps that are checked")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = options.peers.split(",") if options.peers else [peer for peer in peers if peer not in ONLY_IF_ASKED]
    if unknown := [peer for peer in asked if peer not in peers]:
        parser.error(f"--peers: no peer is called {', '.join(unknown)}; there are {', '.join(peers)}")
    absent = [peer for peer in asked if missing(peer)]
    if options.peers and absent:
        parser.error("; ".join(f"{TITLES[peer]}: {missing(peer)}" for peer in absent))
    job = Job(options.ranks, options.precision, options.width, options.layers, options.batch, options.sequence)
    report = measure(job, [peer for peer in asked if peer not in absent], options.warmup, options.steps)
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(job, report["engines"], absent)


if __name__ == "__main__":
    main()
