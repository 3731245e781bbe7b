"""Shared by the tensor tests: meshes and cuts, made on a rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raggedfsdp.tensor import RaggedDTensor, RaggedShard, distribute_tensor


@functools.cache
def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def world_mesh() -> DeviceMesh:
    return mesh_of(dist.get_world_size())


def by_elements(shape: Sequence[int], world: int, seed: int = 0) -> RaggedShard:
    """A cut anywhere, some ranks empty where there are few elements; the same on every rank."""
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(1000 * world + numel + seed)
    cuts = torch.randint(0, numel + 1, (world - 1,), generator=generator).sort().values.tolist()
    edges = [0, *cuts, numel]
    return RaggedShard(tuple(range(len(shape))), [b - a for a, b in itertools.pairwise(edges)])


def ragged(full: torch.Tensor, seed: int = 0) -> RaggedDTensor:
    """This rank's piece of a tensor that every rank has; nothing is sent."""
    mesh = world_mesh()
    return distribute_tensor(full, mesh, by_elements(full.shape, mesh.size(), seed), src_data_rank=None)
