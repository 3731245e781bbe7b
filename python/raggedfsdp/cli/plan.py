"""`raggedfsdp plan`: how a model would lie on many devices, as a table, JSON, a picture or a plot. No rank is started."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

MOST_DEVICES = 10**9
SWEEP_DEVICES = tuple(2**i for i in range(3, 15))


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


BYTES = {Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2, Dtype.fp8: 1}


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: Annotated[str, typer.Option(help="A preset, or a transformers configuration file.", metavar="NAME|FILE")],
    devices: Annotated[
        str | None, typer.Option(help="How many devices; several for several plans.", metavar="N[,N...]")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows that stay together, 1 if not given.", metavar="K", min=1)] = None,
    policy: Annotated[Path | None, typer.Option(help="JSON from name patterns to granularities.", metavar="FILE")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the gathered parameters.")] = Dtype.bf16,
    max_buckets: Annotated[int, typer.Option(help="Collectives a unit may be split into.", metavar="K", min=1)] = 4,
    collective_cost: Annotated[
        float, typer.Option(help="MiB of padding that one more collective is worth.", metavar="MIB", min=0.0)
    ] = 4.0,
    split_experts: Annotated[
        bool, typer.Option("--split-experts", help="Plan every expert's matrices as tensors of their own.")
    ] = False,
    limit: Annotated[
        float, typer.Option(help="Above this padding, say which blocks are to blame.", metavar="PERCENT", min=0.0)
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw a unit's buffer.", metavar="FILE")] = None,
    unit: Annotated[
        str | None, typer.Option(help="The unit to draw; if not given, the one that most of the model is in.", metavar="NAME")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Plot padding against devices, 8 to 16,384 if not given (PNG, SVG, PDF).", metavar="FILE"),
    ] = None,
) -> None:
    """Show where a model's parameters would lie, and what padding costs.

    Padding is a fraction of the useful elements. A gap of 0 is a proof that no layout of these buckets has less.

    Exit codes: 0 planned, 2 wrong input.
    """
    from raggedfsdp import UsageError
    from raggedfsdp.cli.plan_run import Request, run

    for option, value in (("--collective-cost", collective_cost), ("--limit", limit)):
        if not 0 <= value < 1e12:
            raise UsageError(f"{option}: {value} must be a number from 0 to 1e12")
    if rows is not None and policy is not None:
        raise UsageError("--rows and --policy: give one of them; a policy says the rows of every tensor")
    if devices is None and sweep is None:
        raise UsageError("--devices: say how many, such as --devices 64 or --devices 8,64,1024")
    counts = device_counts(devices) if devices is not None else SWEEP_DEVICES
    request = Request(model, counts, rows or 1, policy, BYTES[dtype], max_buckets, int(collective_cost * 2**20), split_experts)
    run(request, limit / 100, json=json, table=devices is not None, svg=svg, unit=unit, sweep=sweep)


def device_counts(text: str) -> tuple[int, ...]:
    from raggedfsdp import UsageError

    counts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MOST_DEVICES for part in counts):
        raise UsageError(
            f"--devices: {text} must be numbers from 1 to {MOST_DEVICES:,} with commas between them, such as 8,64,1024"
        )
    return tuple(int(part) for part in counts)
