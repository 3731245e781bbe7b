"""`raggedfsdp plan`, once its options are read."""

from __future__ import annotations

import json as json_lines
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raggedfsdp import UsageError
from raggedfsdp.cli import plan_sweep, plan_table
from raggedfsdp.cli.plan_experts import split
from raggedfsdp.cli.plan_svg import draw_unit
from raggedfsdp.models import ROOT, build_model, load_config, units
from raggedfsdp.plan import (
    ModelPlan,
    PlannedUnit,
    Policy,
    UnitPlanOptions,
    UnitShapes,
    plan_model,
    read_policy,
    rows_policy,
    unit_shapes,
)

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Request:
    model: str
    devices: tuple[int, ...]
    rows: int
    policy: Path | None
    element_bytes: int
    max_buckets: int
    collective_cost_bytes: int
    split_experts: bool

    def options(self, devices: int, max_buckets: int | None = None) -> UnitPlanOptions:
        return UnitPlanOptions(
            devices=devices,
            alignment_numel=max(1, _ALIGNMENT_BYTES // self.element_bytes),
            max_buckets=max_buckets or self.max_buckets,
            element_bytes=self.element_bytes,
            collective_cost_bytes=self.collective_cost_bytes,
        )

    def policy_function(self) -> Policy:
        return rows_policy(self.rows) if self.policy is None else read_policy(self.policy)


def run(
    request: Request, limit: float, json: bool, table: bool, svg: Path | None, unit: str | None, sweep: Path | None
) -> None:
    policy = request.policy_function()
    shapes = shapes_of(request.model, request.split_experts)
    plans = [plan_model(shapes, policy, request.options(n)) for n in request.devices] if table else []
    if json:
        entries = [plan_table.as_json(request, plan) for plan in plans]
        print(json_lines.dumps(entries[0] if len(entries) == 1 else entries, indent=1))
    elif table:
        plan_table.show(request, plans, limit)
    if svg is not None and plans:
        write(svg, "--svg", draw_unit(choose(plans[0], unit), plans[0].options).encode())
    if sweep is not None:
        write(sweep, "--sweep", plan_sweep.plot(request, shapes, sweep.suffix.lower()))


def shapes_of(model: str, split_experts: bool) -> list[UnitShapes]:
    found = unit_shapes(units(build_model(load_config(model), "meta")), ROOT)
    return [split(unit) for unit in found] if split_experts else found


def choose(plan: ModelPlan, name: str | None) -> PlannedUnit:
    if name is None:
        return max(plan.units, key=lambda u: u.shapes.repeat * u.plan.useful_numel())
    for unit in plan.units:
        if unit.shapes.unit == name:
            return unit
    raise UsageError(f"--unit: no unit is called {name}; there are {', '.join(names(plan.units))}")


def names(units: Sequence[PlannedUnit]) -> list[str]:
    return [unit.shapes.unit for unit in units]


def write(path: Path, option: str, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as e:
        raise UsageError(f"{option}: cannot write {path}: {e.strerror}") from e
    print(f"wrote {path}", file=sys.stderr)
