"""Checks that may fail on one rank only, agreed before anybody acts on them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from raggedfsdp.tensor._layout import Layout, UsageError

if TYPE_CHECKING:
    from raggedfsdp import _C


def _fingerprint(layout: Layout) -> int:
    return zlib.crc32(repr((tuple(layout.shape), layout.placements, layout.granularity.to_string())).encode())


def _gather_rows(row: list[int], comm: _C.Comm, device: str) -> list[list[int]]:
    table = torch.zeros(comm.size, len(row), dtype=torch.int64)
    table[comm.rank] = torch.tensor(row)
    table = table.to(device)  # where the mesh's transport can reach it
    comm.all_gather(table.view(-1)).order_after()
    return table.tolist()


def agree_on_lengths(local: torch.Tensor, layout: Layout) -> None:
    """Raises the same UsageError on every rank unless each passed a flat piece of the length that the cut gives it."""
    cause: Exception | None = None
    expected: list[int] = []
    try:
        expected = list(layout.extents.numels)
    except UsageError as error:  # must not raise before the others know
        cause = error
    flat = local.dim() == 1 and local.is_contiguous()
    row = [local.numel(), int(flat), int(cause is None), _fingerprint(layout), zlib.crc32(str(local.dtype).encode())]
    rows = _gather_rows(row, layout.comm, layout.mesh.device_type)
    if any(not r[2] for r in rows):
        ranks = [i for i, r in enumerate(rows) if not r[2]]
        raise UsageError(
            f"RaggedDTensor.from_local: the placements do not fit on rank(s) {ranks}: {cause or 'see there'}"
        ) from cause
    for column, what in ((3, "shape, placements or granularity"), (4, "dtype")):
        odd = [i for i, r in enumerate(rows) if r[column] != rows[0][column]]
        if odd:
            raise UsageError(
                f"RaggedDTensor.from_local: rank(s) {odd} passed another {what} than rank 0; all must pass the same"
            )
    wrong = [i for i, r in enumerate(rows) if r[0] != expected[i] or not r[1]]
    if wrong:
        came = [r[0] if r[1] else f"{r[0]} (not flat and contiguous)" for r in rows]
        raise UsageError(
            f"RaggedDTensor.from_local: rank(s) {wrong} passed a piece of the wrong length: {layout.placements} of shape "
            f"{tuple(layout.shape)} expects flat pieces of {expected} elements, came {came}"
        )
