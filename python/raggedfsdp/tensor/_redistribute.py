"""Changing placements, differentiably: the gradient comes back in the placement that the tensor had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from raggedfsdp import _C
from raggedfsdp.tensor._dtensor import RaggedDTensor, wrap
from raggedfsdp.tensor._layout import Layout, RaggedShard, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _gathered(tensor: RaggedDTensor) -> torch.Tensor:
    layout = tensor._layout
    return _C.gather_ragged(tensor._local_tensor, layout.extents, layout.comm).wait().view(layout.shape)


class ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.layout = tensor._layout
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> RaggedDTensor:
        return wrap(gradient.contiguous(), ctx.layout)


class FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout) -> RaggedDTensor:
        return wrap(local.detach(), layout)

    @staticmethod
    def backward(ctx: Any, gradient: RaggedDTensor) -> tuple[torch.Tensor, None]:
        return gradient._local_tensor, None


class FullTensor(torch.autograd.Function):
    """The gradient of the whole is taken to be the same on all ranks, as DTensor does for Replicate: each keeps its piece."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.layout = tensor._layout
        return _gathered(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> RaggedDTensor:
        return wrap(ctx.layout.slice_of(gradient).clone(), ctx.layout)


class Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor, target: Layout) -> RaggedDTensor:
        ctx.source = tensor._layout
        return _resharded(tensor, target)

    @staticmethod
    def backward(ctx: Any, gradient: RaggedDTensor) -> tuple[RaggedDTensor, None]:
        return _resharded(gradient, ctx.source), None


def _resharded(tensor: RaggedDTensor, target: Layout) -> RaggedDTensor:
    source = tensor._layout
    return wrap(_C.reshard_ragged(tensor._local_tensor, source.extents, target.extents, source.comm).wait(), target)


def redistribute(
    tensor: RaggedDTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    unsupported: dict[str, Any],
) -> DTensor:
    asked = {k: v for k, v in unsupported.items() if v}
    if placements is None or asked or (mesh is not None and mesh != tensor.device_mesh):
        raise UsageError(
            f"RaggedDTensor.redistribute: expected placements on the tensor's own mesh and no other option, came placements="
            f"{placements}, mesh={mesh}, {asked}"
        )
    target = tensor._layout.with_placements(placements)
    if all(p.is_replicate() for p in target.placements) and len(target.placements) == tensor.device_mesh.ndim:
        return DTensor.from_local(FullTensor.apply(tensor), tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
    if target.mesh_dim != tensor._layout.mesh_dim:
        raise UsageError(
            f"RaggedDTensor.redistribute: from {tensor.placements} to {target.placements}: the ragged cut can't move to "
            "another mesh dim; redistribute to Replicate() first"
        )
    return Reshard.apply(tensor, target)


__all__ = ["FromLocal", "FullTensor", "RaggedShard", "Reshard", "ToLocal", "redistribute"]
