"""Fused experts taken apart: (E, a, b) as E matrices, a fused gate and up as two, in the order of checkpoints."""

from __future__ import annotations

from raggedfsdp.plan import Shape, UnitShapes

_FUSED = "gate_up_proj"


def split(unit: UnitShapes) -> UnitShapes:
    fused = [(name, shape) for name, shape in unit.tensors if len(shape) == 3]
    if not fused:
        return unit
    down = next((shape for name, shape in fused if not name.endswith(_FUSED)), None)
    parts = [part for expert in range(fused[0][1][0]) for name, shape in fused for part in _matrices(name, shape, expert, down)]
    first = unit.tensors.index(fused[0])
    others = [tensor for tensor in unit.tensors if tensor not in fused]
    return UnitShapes(unit.unit, unit.repeat, (*others[:first], *parts, *others[first:]))


def _matrices(name: str, shape: Shape, expert: int, down: Shape | None) -> list[tuple[str, Shape]]:
    prefix, _, last = name.rpartition(".")
    _, a, b = shape
    if not name.endswith(_FUSED) or down is None:
        return [(f"{prefix}.{expert}.{last}.weight", (a, b))]
    # The doubled side is the one whose half is down's: (2F, H) in most models, (H, 2F) in some.
    half = (a // 2, b) if sorted((a // 2, b)) == sorted(down[1:]) else (a, b // 2)
    return [(f"{prefix}.{expert}.{part}_proj.weight", half) for part in ("gate", "up")]
