"""Where the parameters of a model's units lie on many devices: the planner, without an engine.

`plan_bucket` and `plan_unit` are those of `ragged/plan.h` and `ragged/plan_unit.h`; sizes count elements.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from raggedfsdp._C import (
    Blame,
    Granularity,
    Interval,
    Order,
    PaddingReport,
    Plan,
    PlanOptions,
    RaggedCut,
    TensorSpec,
    UnitBucket,
    UnitPlan,
    UnitPlanOptions,
    UnitPlans,
    UsageError,
    explain_padding,
    plan_bucket,
    plan_unit,
    plan_units,
    ragged_cut,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Blame",
    "Granularity",
    "Interval",
    "ModelPlan",
    "Order",
    "PaddingReport",
    "Plan",
    "PlanOptions",
    "PlannedUnit",
    "Policy",
    "RaggedCut",
    "TensorSpec",
    "UnitBucket",
    "UnitPlan",
    "UnitPlanOptions",
    "UnitPlans",
    "UnitShapes",
    "explain_padding",
    "plan_bucket",
    "plan_model",
    "plan_unit",
    "plan_units",
    "ragged_cut",
    "read_policy",
    "rows_policy",
    "unit_shapes",
]

Shape = tuple[int, ...]
Policy = Callable[[str, Shape], Granularity]  # of a parameter's name in its model, and its shape


@dataclass(frozen=True)
class UnitShapes:
    """Units whose parameters have the same names and shapes, folded into one."""

    unit: str  # the first of them
    repeat: int
    tensors: tuple[tuple[str, Shape], ...]  # names without the unit's


@dataclass(frozen=True)
class PlannedUnit:
    shapes: UnitShapes
    specs: tuple[TensorSpec, ...]
    plan: UnitPlan


@dataclass(frozen=True)
class ModelPlan:
    units: tuple[PlannedUnit, ...]
    options: UnitPlanOptions
    plan_ms: float  # of all units together

    @property
    def useful_numel(self) -> int:
        return sum(u.shapes.repeat * u.plan.useful_numel() for u in self.units)

    @property
    def padding_numel(self) -> int:
        return sum(u.shapes.repeat * u.plan.padding_numel() for u in self.units)

    @property
    def padding(self) -> float:
        return fraction(self.padding_numel, self.useful_numel)


def fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def rows_policy(rows: int) -> Policy:
    granularity = Granularity.rows(rows)
    return lambda name, shape: granularity


def read_policy(path: Path) -> Policy:
    """From a JSON object of name patterns, the first match counts: {"*.experts.*": "rows(16)", "*": "elements"}."""
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"--policy: cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise UsageError(f"--policy: {path} is not JSON: {e}") from e
    if not isinstance(rules, dict) or not all(isinstance(v, str) for v in rules.values()):
        raise UsageError(f'--policy: {path} must hold one object such as {{"*.experts.*": "rows(16)", "*": "elements"}}')
    parsed = [(pattern, Granularity.parse(text)) for pattern, text in rules.items()]

    def policy(name: str, shape: Shape) -> Granularity:
        for pattern, granularity in parsed:
            if fnmatchcase(name, pattern):
                return granularity
        raise UsageError(f'--policy: {path} has no pattern for {name} {shape}; end it with "*": "elements"')

    return policy


def unit_shapes(units: Iterable[tuple[str, nn.Module]], root: str = "root") -> list[UnitShapes]:
    """What each unit wraps: its parameters that no earlier unit has. The root is shown first, as it is gathered first."""
    seen: set[int] = set()
    names: dict[tuple[tuple[str, Shape], ...], list[str]] = {}
    for unit, module in units:
        own = [(name, p) for name, p in module.named_parameters() if id(p) not in seen]
        seen.update(id(p) for _, p in own)
        if own:
            names.setdefault(tuple((name, tuple(p.shape)) for name, p in own), []).append(unit)
    folded = [UnitShapes(alike[0], len(alike), tensors) for tensors, alike in names.items()]
    return sorted(folded, key=lambda u: u.unit != root)


def plan_model(units: Sequence[UnitShapes], policy: Policy, options: UnitPlanOptions) -> ModelPlan:
    specs = [_specs(unit, policy) for unit in units]
    started = time.perf_counter()
    plans = plan_units(specs, options)
    plan_ms = 1000 * (time.perf_counter() - started)
    found = (plans.distinct[i] for i in plans.of_unit)
    planned = (PlannedUnit(u, tuple(s), p) for u, s, p in zip(units, specs, found, strict=True))
    return ModelPlan(tuple(planned), options, plan_ms)


def _specs(unit: UnitShapes, policy: Policy) -> list[TensorSpec]:
    return [TensorSpec(name, shape, policy(name, shape).block_numel(shape)) for name, shape in unit.tensors]
