"""Making ragged tensors from whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Placement

from raggedfsdp import _C
from raggedfsdp.tensor._dtensor import Granularity, RaggedDTensor, wrap
from raggedfsdp.tensor._layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def distribute_tensor(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placement | Sequence[Placement],
    *,
    granularity: Granularity | None = None,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Cuts a whole tensor. The values are those of rank `src_data_rank` along the ragged mesh dim, sent in one all-to-all; with
    None every rank cuts its own and nothing is sent."""
    listed = [placements] if isinstance(placements, Placement) else list(placements)
    layout = Layout(mesh, listed, tensor.shape, Granularity.elements() if granularity is None else granularity)
    extents = layout.extents
    flat = tensor.detach().reshape(-1)
    if src_data_rank is None or tensor.is_meta or layout.extents.total == 0:
        local = layout.slice_of(flat).clone()
    else:
        owner = _C.extents_of([tensor.numel() if r == src_data_rank else 0 for r in range(len(extents.numels))])
        mine = flat if layout.rank == src_data_rank else flat[:0]
        local = _C.reshard_ragged(mine, owner, extents, layout.comm).wait()
    return wrap(local, layout, requires_grad=tensor.requires_grad)
