"""Padding against the number of devices, for several sizes of block (the paper's padding figure)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raggedfsdp import UsageError
from raggedfsdp.plan import UnitShapes, plan_model, rows_policy

if TYPE_CHECKING:
    from raggedfsdp.cli.plan_run import Request

ROWS = (1, 16, 128)
_FORMATS = (".png", ".svg", ".pdf")
_COLORS = ("#2f6db3", "#d97b1f", "#5a9e4b")
_LEAST = 1e-5  # zero has no place on a logarithmic axis


def plot(request: Request, shapes: Sequence[UnitShapes], suffix: str) -> bytes:
    if suffix not in _FORMATS:
        raise UsageError(f"--sweep: the file must end in {', '.join(_FORMATS)}, not in {suffix or 'nothing'}")
    if request.policy is not None:
        raise UsageError(f"--sweep: plots rows {', '.join(map(str, ROWS))}; leave --policy out")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for rows, color in zip(ROWS, _COLORS, strict=True):
        one = paddings(request, shapes, rows, max_buckets=1)
        split = paddings(request, shapes, rows, request.max_buckets)
        axes.plot(request.devices, [max(p, _LEAST) for p in split], "o-", color=color, ms=4, label=f"{rows}-row blocks")
        axes.plot(request.devices, [max(p, _LEAST) for p in one], ":", color=color, lw=1.2)
    axes.plot([], [], ":", color="#555555", label="the same, never split")
    axes.axhline(0.03, color="#999999", lw=0.8, zorder=0)
    axes.annotate("3 %", (request.devices[0], 0.03), xytext=(0, 3), textcoords="offset points", color="#777777", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="padding / parameters", title=f"Padding of {request.model}")
    axes.set_xticks(request.devices, [f"{n:,}" for n in request.devices], rotation=35, ha="right", fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
    axes.grid(axis="y", color="#e8e8e8")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format=suffix[1:], dpi=160)
    pyplot.close(figure)
    return out.getvalue()


def paddings(request: Request, shapes: Sequence[UnitShapes], rows: int, max_buckets: int) -> list[float]:
    return [plan_model(shapes, rows_policy(rows), request.options(n, max_buckets)).padding for n in request.devices]
