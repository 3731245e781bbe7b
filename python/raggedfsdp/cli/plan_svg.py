"""A unit's buffers as a picture: one row per device, or per group of devices where there are many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from raggedfsdp.cli.plan_cells import Cell, Row, picture
from raggedfsdp.cli.words import count, size
from raggedfsdp.plan import Plan, PlannedUnit, TensorSpec, UnitPlanOptions, fraction

_WIDTH = 1000
_LABELS = 150  # at the left of the bars
_ROW, _GAP, _TOP = 26, 6, 48
_LEGEND_LINE, _LEGEND_COLUMNS = 18, 2
_NARROWEST_BLOCK = 5.0  # pixels between block lines
_CHARACTER = 6.2  # pixels of the font, on average
_COLORS = (
    "#7fa8d1", "#e8b26a", "#8fbf83", "#d98f8a", "#b39bc8", "#c4a484", "#e3a6c6", "#a8b0b8",
    "#c9c46b", "#79c0c5", "#5f86b3", "#c98c3c", "#659a59", "#b9655f", "#8d73a8", "#9c7c5c",
)  # fmt: skip


@dataclass(frozen=True)
class _Kinds:
    """Tensors with the same shape and block have one colour."""

    of: dict[tuple[tuple[int, ...], int], int]

    def color(self, tensor: TensorSpec) -> str:
        return _COLORS[self.of[_kind(tensor)] % len(_COLORS)]


def _kind(tensor: TensorSpec) -> tuple[tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.block_numel


def draw_unit(unit: PlannedUnit, options: UnitPlanOptions) -> str:
    kinds = _kinds_of(unit)
    body: list[str] = []
    y = 34
    for i, bucket in enumerate(unit.plan.buckets):
        rows = picture(bucket.plan, _WIDTH)
        body += _panel(_Panel(bucket.plan, rows, f"bucket {i + 1}: " if len(unit.plan.buckets) > 1 else ""), options, kinds, y)
        y += _TOP + len(rows) * (_ROW + _GAP)
    legend, height = _legend(unit, kinds, y + 16)
    padding = fraction(unit.plan.padding_numel(), unit.plan.useful_numel())
    parameters = count(unit.plan.useful_numel())
    title = f"{unit.shapes.unit} on {options.devices:,} devices: {parameters} parameters, padding {100 * padding:.2f} %"
    return "\n".join([*_head(height, title), *body, *legend, "</svg>\n"])


def _kinds_of(unit: PlannedUnit) -> _Kinds:
    numel: dict[tuple[tuple[int, ...], int], int] = {}
    for tensor in unit.specs:
        numel[_kind(tensor)] = numel.get(_kind(tensor), 0) + tensor.numel()
    largest_first = sorted(numel, key=lambda kind: -numel[kind])
    return _Kinds({kind: i for i, kind in enumerate(largest_first)})


def _head(height: float, title: str) -> list[str]:
    width = _LABELS + _WIDTH + 20
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#222222">',
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#ffffff"/><rect width="1.5" height="6" fill="#c0392b"/></pattern></defs>',
        f'<rect width="{width}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]


@dataclass(frozen=True)
class _Panel:
    plan: Plan
    rows: list[tuple[Row, list[Cell]]]
    prefix: str


def _panel(panel: _Panel, options: UnitPlanOptions, kinds: _Kinds, y: float) -> Iterator[str]:
    plan = panel.plan
    padding = fraction(plan.padding_numel(), plan.useful_numel())
    text = (
        f"{panel.prefix}{len(plan.tensors)} tensors, {count(plan.shard_numel)} elements a device, "
        f"padding {100 * padding:.2f} %, {size(plan.global_numel() * options.element_bytes)} gathered, "
        f"order {plan.order.name.lower()}"
    )
    yield f'<text x="10" y="{y + 24:g}" font-size="12" fill="#444444">{escape(text)}</text>'
    top = y + _TOP - 12
    for row, cells in panel.rows:
        yield f'<text x="{_LABELS - 8}" y="{top + 17:g}" text-anchor="end" fill="#555555">{row.label}</text>'
        for cell in cells:
            yield from _cell(plan, row, cell, kinds, top)
        yield f'<rect x="{_LABELS}" y="{top:g}" width="{_WIDTH}" height="{_ROW}" fill="none" stroke="#333333"/>'
        top += _ROW + _GAP


def _cell(plan: Plan, row: Row, cell: Cell, kinds: _Kinds, top: float) -> Iterator[str]:
    x, width = _LABELS + cell.x, cell.width
    box = f'x="{x:.2f}" y="{top:g}" width="{width:.2f}"'
    if cell.tensor is None:
        yield f'<rect {box} height="{_ROW}" fill="url(#padding)"/>'
        return
    tensor = plan.tensors[cell.tensor]
    filled = _ROW * (1 - cell.padding)
    if cell.padding > 0.01:  # a summary: the part of these columns that is padding hangs from the top
        yield f'<rect {box} height="{_ROW}" fill="url(#padding)"/>'
    title = f"<title>{escape(tensor.name)} {tuple(tensor.shape)}</title>"
    yield (
        f'<rect x="{x:.2f}" y="{top + _ROW - filled:.2f}" width="{width:.2f}" height="{filled:.2f}" '
        f'fill="{kinds.color(tensor)}" stroke="#ffffff" stroke-width="0.6">{title}</rect>'
    )
    yield from _block_lines(plan, row, cell, top)
    label = tensor.name.removesuffix(".weight").split(".")[-1]
    if cell.padding <= 0.35 and len(label) * _CHARACTER < width - 6:
        yield f'<text x="{x + width / 2:.1f}" y="{top + 17:g}" text-anchor="middle">{escape(label)}</text>'


def _block_lines(plan: Plan, row: Row, cell: Cell, top: float) -> Iterator[str]:
    """Where a device boundary may fall, if the lines can be told apart."""
    assert cell.tensor is not None
    block = plan.tensors[cell.tensor].block_numel
    scale = _WIDTH / row.numel
    if block * scale < _NARROWEST_BLOCK or row.devices > 1:
        return
    begin = plan.offsets[cell.tensor]
    first = begin + -(-(cell.begin - begin + 1) // block) * block
    for at in range(first, cell.end, block):
        x = _LABELS + (at - row.begin) * scale
        yield f'<path d="M{x:.2f} {top:g}v4M{x:.2f} {top + _ROW:g}v-4" stroke="#444444" stroke-width="0.8"/>'


def _legend(unit: PlannedUnit, kinds: _Kinds, y: float) -> tuple[list[str], float]:
    members: dict[tuple[tuple[int, ...], int], list[TensorSpec]] = {}
    for tensor in unit.specs:
        members.setdefault(_kind(tensor), []).append(tensor)
    lines = []
    column = (_LABELS + _WIDTH) / _LEGEND_COLUMNS
    for i, kind in enumerate(kinds.of):
        x, line_y = 10 + (i % _LEGEND_COLUMNS) * column, y + (i // _LEGEND_COLUMNS) * _LEGEND_LINE
        lines.append(f'<rect x="{x:g}" y="{line_y - 10:g}" width="12" height="12" fill="{kinds.color(members[kind][0])}"/>')
        lines.append(f'<text x="{x + 18:g}" y="{line_y:g}">{escape(_legend_text(members[kind]))}</text>')
    last = y + -(-len(kinds.of) // _LEGEND_COLUMNS) * _LEGEND_LINE
    lines.append(
        f'<rect x="10" y="{last - 10:g}" width="12" height="12" fill="url(#padding)" stroke="#c0392b" stroke-width="0.5"/>'
    )
    lines.append(
        f'<text x="28" y="{last:g}">padding; ticks mark blocks where they can be told apart: no device boundary cuts one</text>'
    )
    return lines, last + 14


def _legend_text(tensors: list[TensorSpec]) -> str:
    first = tensors[0]
    shape = "x".join(str(n) for n in first.shape) or "scalar"
    alike = f" and {len(tensors) - 1} alike" if len(tensors) > 1 else ""
    row = first.shape[-1] if len(first.shape) > 1 else 1
    block = first.block_numel
    blocks = (
        f"{block // row:,} row{'s' * (block // row != 1)}"
        if len(first.shape) > 1 and block % row == 0
        else f"{block:,} elements"
    )
    return f"{first.name}{alike}: {shape}, block {blocks}"
