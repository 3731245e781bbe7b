"""Making ragged tensors from whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from raggedfsdp import _C
from raggedfsdp.tensor._dtensor import Granularity, RaggedDTensor, wrap
from raggedfsdp.tensor._layout import Layout, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REDUCTIONS = {"sum": _C.ReduceOp.SUM, "avg": _C.ReduceOp.AVG, "max": _C.ReduceOp.MAX, "min": _C.ReduceOp.MIN}


def distribute_tensor(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placement | Sequence[Placement],
    *,
    granularity: Granularity | None = None,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Cuts a whole tensor. The values are those of rank `src_data_rank` along the ragged mesh dim, sent in one all-to-all; with
    None every rank cuts its own and nothing is sent. Of a DTensor, Replicate() is cut without sending and Partial() is reduced
    on the way, in one reduce-scatter."""
    listed = [placements] if isinstance(placements, Placement) else list(placements)
    layout = Layout(mesh, listed, tensor.shape, Granularity.elements() if granularity is None else granularity)
    extents = layout.extents
    if isinstance(tensor, DTensor):
        return wrap(_cut_dtensor(tensor, layout), layout, requires_grad=tensor.requires_grad)
    flat = tensor.detach().reshape(-1)
    if src_data_rank is None or tensor.is_meta or layout.extents.total == 0:
        local = layout.slice_of(flat).clone()
    else:
        owner = _C.extents_of([tensor.numel() if r == src_data_rank else 0 for r in range(len(extents.numels))])
        mine = flat if layout.rank == src_data_rank else flat[:0]
        local = _C.reshard_ragged(mine, owner, extents, layout.comm).wait()
    return wrap(local, layout, requires_grad=tensor.requires_grad)


def _cut_dtensor(tensor: DTensor, layout: Layout) -> torch.Tensor:
    others = [p for d, p in enumerate(tensor.placements) if d != layout.mesh_dim]
    source = tensor.placements[layout.mesh_dim] if tensor.device_mesh == layout.mesh else None
    flat = tensor.to_local().detach().reshape(-1)
    if all(p.is_replicate() for p in others):
        if isinstance(source, Replicate):
            return layout.slice_of(flat).clone()
        if type(source) is Partial and source.reduce_op in _REDUCTIONS:
            return _C.reduce_to_ragged(flat, layout.extents, _REDUCTIONS[source.reduce_op], layout.comm).wait()
    raise UsageError(
        f"distribute_tensor: a DTensor placed as {tensor.placements} on {tensor.device_mesh}: expected Replicate() everywhere, "
        f"or Partial({'|'.join(_REDUCTIONS)}) along mesh dim {layout.mesh_dim} of {layout.mesh}; redistribute() it first"
    )
