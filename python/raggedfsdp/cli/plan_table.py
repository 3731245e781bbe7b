"""A model's plan as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raggedfsdp.cli.words import count, size
from raggedfsdp.plan import ModelPlan, Plan, PlannedUnit, UnitBucket, explain_padding, fraction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raggedfsdp.cli.plan_run import Request

console = Console(highlight=False)
_COLUMNS = {"order": 9, "shard": 7, "padding": 8, "bound": 8, "gap": 3, "gathered": 9}  # and how wide at least


def show(request: Request, plans: Sequence[ModelPlan], limit: float) -> None:
    for plan in plans:
        console.print(_heading(request, plan), soft_wrap=True)
        console.print(_table(plan))
        _blame(plan, limit)
        console.print()


def as_json(request: Request, plan: ModelPlan) -> dict[str, Any]:
    return {
        "model": request.model,
        "devices": plan.options.devices,
        "rows": request.rows if request.policy is None else None,
        "max_buckets": plan.options.max_buckets,
        "padding": plan.padding,
        "plan_ms": plan.plan_ms,
        "units": [_unit_json(unit) for unit in plan.units],
    }


def _unit_json(unit: PlannedUnit) -> dict[str, Any]:
    return {
        "unit": unit.shapes.unit,
        "repeat": unit.shapes.repeat,
        "padding": fraction(unit.plan.padding_numel(), unit.plan.useful_numel()),
        "buckets": [_bucket_json(unit, bucket) for bucket in unit.plan.buckets],
    }


def _bucket_json(unit: PlannedUnit, bucket: UnitBucket) -> dict[str, Any]:
    plan = bucket.plan
    return {
        "tensors": [unit.specs[i].name for i in bucket.members],
        "order": plan.order.name.lower(),
        "shard_numel": plan.shard_numel,
        "padding": fraction(plan.padding_numel(), plan.useful_numel()),
        "bound_padding": fraction(plan.padding_numel() - plan.gap_numel(), plan.useful_numel()),
    }


def _heading(request: Request, plan: ModelPlan) -> str:
    blocks = f"{request.rows}-row blocks" if request.policy is None else f"policy {request.policy}"
    return (
        f"[bold]{request.model}[/], {count(plan.useful_numel)} parameters on {plan.options.devices:,} devices, {blocks}: "
        f"[bold]padding {percent(plan.padding)}[/], planned in {plan.plan_ms:.1f} ms"
    )


def _table(plan: ModelPlan) -> Table:
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    others = sum(width + 2 for width in _COLUMNS.values())
    table.add_column("unit", overflow="ellipsis", no_wrap=True, max_width=max(16, console.width - others))
    for column, width in _COLUMNS.items():
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for unit in plan.units:
        _add_unit(table, unit, plan.options.element_bytes)
    return table


def _add_unit(table: Table, unit: PlannedUnit, element_bytes: int) -> None:
    buckets, useful = unit.plan.buckets, unit.plan.useful_numel()
    name = unit.shapes.unit + (f" x {unit.shapes.repeat}" if unit.shapes.repeat > 1 else "")
    if len(buckets) > 1:
        total = percent(fraction(unit.plan.padding_numel(), useful))
        table.add_row(name, f"{len(buckets)} buckets", "", total)
        table.add_row(
            "[dim]  in one bucket[/]", "", "", f"[dim]{percent(fraction(unit.plan.one_bucket_padding_numel, useful))}[/]"
        )
    for bucket in buckets:
        p = bucket.plan
        values = (p.padding_numel(), p.padding_numel() - p.gap_numel(), p.gap_numel())
        table.add_row(
            name if len(buckets) == 1 else f"  {_members(p)}",
            p.order.name.lower(),
            count(p.shard_numel),
            *(percent(fraction(v, p.useful_numel())) for v in values),
            size(p.global_numel() * element_bytes),
        )


def _members(plan: Plan) -> str:
    """The largest tensors of a bucket, enough to know it by."""
    largest = sorted(plan.tensors, key=lambda t: t.numel(), reverse=True)
    names = list(dict.fromkeys(t.name.removesuffix(".weight").split(".")[-1] for t in largest))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _blame(plan: ModelPlan, limit: float) -> None:
    for unit in plan.units:
        if fraction(unit.plan.padding_numel(), unit.plan.useful_numel()) > limit:
            report = explain_padding(unit.specs, plan.options, limit)
            console.print(f"[yellow]{unit.shapes.unit}[/]: {report.describe().rstrip()}", soft_wrap=True)


def percent(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.2f} %" if value < 10 else f"{100 * value:,.0f} %"
