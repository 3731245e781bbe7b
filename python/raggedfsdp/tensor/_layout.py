"""How one tensor is cut over its mesh: metadata fixed when the tensor is made, shared by everything made from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raggedfsdp import _C
from raggedfsdp._C import RaggedShard, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


class Layout:
    """Mesh, placements, global shape and granularity. Nothing is checked and nothing is sent before it is needed."""

    __slots__ = ("__dict__", "_scalar_specs", "_specs", "granularity", "mesh", "placements", "shape")

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], granularity: _C.Granularity
    ) -> None:
        self.mesh = mesh
        self.placements = tuple(placements)
        self.shape = torch.Size(shape)
        self.granularity = granularity
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        self._scalar_specs: dict[tuple[Any, torch.dtype], DTensorSpec] = {}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Layout)
            and self.shape == other.shape
            and self.placements == other.placements
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.placements))

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        spec = self._specs.get(dtype)
        if spec is None:
            meta = TensorMeta(self.shape, contiguous_stride(self.shape), dtype)
            spec = self._specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    @cached_property
    def mesh_dim(self) -> int:
        """The mesh dim that RaggedShard cuts; all others must be Replicate."""
        ragged = [d for d, p in enumerate(self.placements) if isinstance(p, RaggedShard)]
        others = [p for p in self.placements if not isinstance(p, (RaggedShard, Replicate))]
        if len(ragged) != 1 or others or len(self.placements) != self.mesh.ndim:
            raise UsageError(
                f"RaggedDTensor: placements {self.placements} on a mesh of {self.mesh.ndim} dims: expected one placement per "
                "mesh dim, exactly one of them a RaggedShard and the others Replicate()"
            )
        return ragged[0]

    @cached_property
    def extents(self) -> _C.RaggedExtents:
        """Lengths and offsets of all ranks of the mesh dim; raises UsageError where the cut does not fit the shape."""
        placement: Any = self.placements[self.mesh_dim]
        ranks = self.mesh.size(self.mesh_dim)
        if len(placement.local_units) != ranks:
            raise UsageError(
                f"RaggedDTensor: {placement} names {len(placement.local_units)} ranks, mesh dim {self.mesh_dim} has {ranks}; "
                "give one count per rank"
            )
        return _C.ragged_extents(placement, list(self.shape))

    @cached_property
    def rank(self) -> int:
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise UsageError(f"RaggedDTensor: this rank is not part of the mesh {self.mesh}")
        return int(coordinate[self.mesh_dim])

    @cached_property
    def interval(self) -> tuple[int, int]:
        """First element and number of elements that this rank holds."""
        extents = self.extents
        return extents.offsets[self.rank], extents.numels[self.rank]

    @cached_property
    def comm(self) -> _C.Comm:
        from raggedfsdp.comm import comm_for  # comm.py needs process groups; a layout as such does not

        return comm_for(self.mesh, self.mesh_dim)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, flat: a view where `full` is contiguous."""
        begin, numel = self.interval
        return full.reshape(-1).narrow(0, begin, numel)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        return Layout(self.mesh, placements, self.shape, self.granularity)

    def scalar_spec(self, placement: Partial, dtype: torch.dtype) -> DTensorSpec:
        """Of a 0-d value that every rank of the mesh dim computed from its own part."""
        spec = self._scalar_specs.get((placement, dtype))
        if spec is None:
            placements = tuple(placement if d == self.mesh_dim else Replicate() for d in range(len(self.placements)))
            meta = TensorMeta(torch.Size(), (), dtype)
            spec = self._scalar_specs[placement, dtype] = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return spec
