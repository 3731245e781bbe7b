"""`raggedfsdp train`: the options; then this process either starts the ranks or is one of them."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_RANKS = 4


class Precision(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def _option(text: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(help=text, metavar=metavar, **more)


def train(
    model: Annotated[str, _option("A preset, or a transformers configuration file.", "NAME|FILE")] = "llama-tiny",
    data: Annotated[Path | None, _option("A file or folder of text, instead of Python's standard library.", "PATH")] = None,
    ranks: Annotated[int | None, _option(f"Ranks to start here, {DEFAULT_RANKS} if not given.", "N", min=1)] = None,
    steps: Annotated[int, _option("Optimiser steps.", "N", min=1)] = 50,
    batch: Annotated[int, _option("Sequences per rank and micro-batch.", "N", min=1)] = 4,
    sequence: Annotated[int, _option("Tokens per sequence.", "N", min=2)] = 128,
    lr: Annotated[float, _option("AdamW's learning rate.", "X", min=0.0)] = 1e-3,
    precision: Annotated[Precision, _option("bf16 keeps parameters and reductions in fp32.")] = Precision.fp32,
    accumulate: Annotated[int, _option("Micro-batches per step.", "N", min=1)] = 1,
    reshard_after_forward: Annotated[
        bool,
        typer.Option(
            "--reshard-after-forward/--no-reshard-after-forward", help="Release a layer between forward and backward."
        ),
    ] = True,
    rows: Annotated[int | None, _option("No shard boundary cuts a block of N rows of a matrix.", "N", min=1)] = None,
    max_buckets: Annotated[
        int | None, _option("At most N collectives per unit; else as many as save more padding than they cost.", "N", min=1)
    ] = None,
    clip: Annotated[float, _option("Largest gradient norm; 0 does not clip.", "X", min=0.0)] = 1.0,
    seed: Annotated[int, _option("Of the parameters and of the text drawn.", "N", min=0)] = 0,
    device: Annotated[str, _option("cpu, cuda, ...; each rank needs its own.", "NAME")] = "cpu",
    json: Annotated[Path | None, _option("Write everything measured to this file.", "FILE")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Repeat every step unsharded and compare.")] = False,
) -> None:
    """Train a causal language model, sharded over ranks that are started here or by torchrun.

    Presets that train in seconds: llama-tiny, gpt-oss-tiny, deepseek-tiny.

    Exit codes: 0 trained, 1 a rank failed, 2 wrong input, 3 --verify found a difference, 130 interrupted.
    """
    started = torchrun_ranks()
    world = started or ranks or DEFAULT_RANKS
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world)))  # read when torch is imported
    from raggedfsdp import UsageError
    from raggedfsdp.cli import run
    from raggedfsdp.recipe import TrainOptions

    options = TrainOptions(
        model=model,
        data=data,
        steps=steps,
        batch=batch,
        sequence=sequence,
        learning_rate=lr,
        precision=precision.value,
        accumulate=accumulate,
        reshard_after_forward=reshard_after_forward,
        rows=rows,
        max_buckets=max_buckets,
        clip_norm=clip,
        seed=seed,
        verify=verify,
    )
    if started and ranks not in (None, started):
        raise UsageError(f"--ranks {ranks}: torchrun started {started} ranks; leave --ranks out")
    code = run.under_torchrun(options, device, json) if started else run.locally(options, world, device, json)
    raise typer.Exit(code)


def torchrun_ranks() -> int | None:
    """How many ranks torchrun has started, if this process is one of them."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
