"""The tables at the end of a training, made of reports alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from rich import box
from rich.table import Table

from raggedfsdp.cli.words import count, share, size
from raggedfsdp.report import MemoryReport, UnitReport, VerifyReport

_MANY_UNITS = 12
_MANY_PARAMETERS = 100


def units_table(units: tuple[UnitReport, ...]) -> Table:
    several = any(u.buckets > 1 for u in units)
    columns = ("parameters", "shard", "padding", "gathered\na step", "reduced\na step", *(["buckets"] if several else []))
    table = _table("Units", "", *columns)
    for unit, name in _alike(units):
        values = [
            name,
            count(unit.parameters),
            size(unit.shard_bytes),
            share(unit.padding_numel, unit.shard_numel * unit.devices),
            size(unit.gathered_bytes_per_step),
            size(unit.reduced_bytes_per_step),
        ]
        table.add_row(*values, *([str(unit.buckets)] if several else []))
    return table


def memory_table(memory: MemoryReport) -> Table:
    table = _table("Memory of one rank", "shards", "gathered pool", "gradients", "peak")
    values = (memory.shard_bytes, memory.pool_bytes, memory.gradient_bytes, memory.peak_bytes)
    table.add_row(*(size(v) for v in values))
    return table


def verify_table(verify: VerifyReport) -> Table:
    """Every parameter, or of very many the most different."""
    table = _table("Largest difference from the unsharded run", "", "absolute", "relative", "tolerance")
    table.add_row("loss", "", _short(verify.loss), f"{verify.loss_tolerance:.0e}")
    table.add_row("gradient norm", "", _short(verify.gradient_norm), f"{verify.gradient_norm_tolerance:.0e}")
    rows = list(verify.parameters)
    more = len(rows) - _MANY_PARAMETERS
    if more > 0:
        rows = sorted(rows, key=lambda d: d.relative, reverse=True)[:_MANY_PARAMETERS]
    for d in rows:
        table.add_row(d.parameter, _short(d.largest), _short(d.relative), f"{verify.parameter_tolerance:.0e}")
    if more > 0:
        table.add_row(f"{more} that differ less", "", "", "")
    return table


def verdict(verify: VerifyReport) -> str:
    if verify.passed:
        return "[green]verify: every step equals the unsharded step within tolerance[/]"
    checks = (
        ("loss", verify.loss, verify.loss_tolerance),
        ("gradient norm", verify.gradient_norm, verify.gradient_norm_tolerance),
        ("parameters", verify.parameter, verify.parameter_tolerance),
    )
    wrong = [f"{name} by {value:.1e} (tolerance {limit:.0e})" for name, value, limit in checks if not value <= limit]
    return f"[red]verify: differs from the unsharded run: {', '.join(wrong)}[/]"


def _alike(units: tuple[UnitReport, ...]) -> list[tuple[UnitReport, str]]:
    """Rows of the table: of many units, those in a row that differ by name only are one."""
    units = tuple(replace(u, unit=u.unit.partition(" (")[0]) for u in units)  # without the root's class
    if len(units) <= _MANY_UNITS:
        return [(u, u.unit) for u in units]
    rows = []
    for _, run in groupby(units, key=lambda u: (u.parameters, u.tensors, u.shard_numel, u.gathered_bytes_per_step)):
        group = list(run)
        last = group[-1].unit.rpartition(".")[2]
        rows.append((group[0], group[0].unit if len(group) == 1 else f"{group[0].unit}-{last}"))
    return rows


def _short(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column(first, vertical="bottom", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", vertical="bottom", no_wrap=True)
    return table
