"""The cells of a plan's picture: what lies in which part of a row, exactly for one device, by columns for many."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from raggedfsdp.plan import Plan

_MOST_DEVICES = 16  # with a row each
_SUMMARY_ROWS = 16
_COLUMNS = 500  # of a summary


@dataclass(frozen=True)
class Row:
    label: str
    begin: int  # elements of the global buffer
    end: int
    devices: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Cell:
    x: float  # of the row's width in pixels
    width: float
    tensor: int | None  # None is padding
    begin: int  # elements of the global buffer
    end: int
    padding: float = 0.0  # the part of a summary's columns that is padding


class Layout:
    """A plan's tensors in the order in which they lie."""

    def __init__(self, plan: Plan) -> None:
        numels = [tensor.numel() for tensor in plan.tensors]
        placed = sorted((begin, begin + n, i) for i, (begin, n) in enumerate(zip(plan.offsets, numels, strict=True)) if n)
        self._placed = placed
        self._starts = [begin for begin, _, _ in placed]

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The parts of tensors in [begin, end), ascending."""
        first, last = max(0, bisect_right(self._starts, begin) - 1), bisect_left(self._starts, end)
        for tensor_begin, tensor_end, i in self._placed[first:last]:
            if max(begin, tensor_begin) < min(end, tensor_end):
                yield max(begin, tensor_begin), min(end, tensor_end), i


def rows_of(plan: Plan) -> list[Row]:
    shard, devices = plan.shard_numel, plan.devices
    if shard == 0:
        return []
    group = 1 if devices <= _MOST_DEVICES else -(-devices // _SUMMARY_ROWS)
    return [
        Row(_label(first, min(first + group, devices)), first * shard, min(first + group, devices) * shard, group)
        for first in range(0, devices, group)
    ]


def _label(first: int, end: int) -> str:
    return f"device {first:,}" if end - first == 1 else f"devices {first:,} to {end - 1:,}"


def picture(plan: Plan, width: float) -> list[tuple[Row, list[Cell]]]:
    """Every row with its cells; rows of one tensor and nothing else are folded where there are many devices."""
    layout = Layout(plan)
    rows: list[tuple[Row, list[Cell]]] = []
    for row in rows_of(plan):
        found = list(cells(layout, row, width))
        last, before = rows[-1] if rows else (row, [])
        if row.devices > 1 and _same_tensor(before, found):
            joined = Row(_label(last.begin // plan.shard_numel, row.end // plan.shard_numel), last.begin, row.end, row.devices)
            rows[-1] = joined, before
        else:
            rows.append((row, found))
    return rows


def _same_tensor(before: list[Cell], now: list[Cell]) -> bool:
    return [(c.tensor, c.padding) for c in before] == [(c.tensor, c.padding) for c in now] and len(now) == 1


def cells(layout: Layout, row: Row, width: float) -> Iterator[Cell]:
    return _exact(layout, row, width) if row.devices == 1 else _summary(layout, row, width)


def _exact(layout: Layout, row: Row, width: float) -> Iterator[Cell]:
    scale = width / row.numel
    at = row.begin
    for begin, end, tensor in layout.spans(row.begin, row.end):
        if begin > at:
            yield Cell((at - row.begin) * scale, (begin - at) * scale, None, at, begin)
        yield Cell((begin - row.begin) * scale, (end - begin) * scale, tensor, begin, end)
        at = end
    if at < row.end:
        yield Cell((at - row.begin) * scale, (row.end - at) * scale, None, at, row.end)


def _summary(layout: Layout, row: Row, width: float) -> Iterator[Cell]:
    """Equal columns, each with the tensor that has most of it; neighbours that look the same are joined."""
    joined: Cell | None = None
    step = width / _COLUMNS
    for column in range(_COLUMNS):
        begin = row.begin + row.numel * column // _COLUMNS
        end = row.begin + row.numel * (column + 1) // _COLUMNS
        spans = list(layout.spans(begin, end))
        useful = sum(e - b for b, e, _ in spans)
        tensor = max(spans, key=lambda s: s[1] - s[0])[2] if spans else None
        padding = round(1 - useful / max(1, end - begin), 1)
        if joined is not None and (joined.tensor, joined.padding) == (tensor, padding):
            joined = Cell(joined.x, joined.width + step, tensor, joined.begin, end, padding)
            continue
        if joined is not None:
            yield joined
        joined = Cell(column * step, step, tensor, begin, end, padding)
    if joined is not None:
        yield joined
