"""Norms and clipping: the value of the unsharded run, in one all-reduce, of the type that FSDP2 returns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, get_total_norm

from raggedfsdp.tensor import RaggedDTensor, RaggedShard
from raggedfsdp.tensor import distribute_tensor as distribute_tensor_ragged
from ranks import run_ranks
from tensor_cases import ragged, world_mesh

ORDERS = [1.0, 2.0, 3.0, math.inf, -math.inf, 0.0]


def _with_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(parameter)
    parameter.grad = gradient
    return parameter


def _ones_in_padded_memory() -> list[nn.Parameter]:
    """R5: twelve ones over three ranks, one shard empty, one gradient None, NaN between and behind the pieces."""
    mesh = world_mesh()
    cuts = [((4, 2), RaggedShard((0,), (3, 1, 0))), ((4,), RaggedShard((0,), (0, 4, 0)))]
    memory = torch.full((32,), math.nan)
    offset = 1
    parameters = []
    for shape, cut in cuts:
        numel = cut.local_units[mesh.get_local_rank()] * (torch.Size(shape).numel() // cut.total_units)
        piece = memory[offset : offset + numel].fill_(1.0)
        offset += numel + 3
        gradient = RaggedDTensor.from_shard(piece, mesh, [cut], shape)
        parameters.append(_with_gradient(gradient.with_local(torch.zeros(numel)), gradient))
    parameters.append(nn.Parameter(ragged(torch.zeros(5))))
    return parameters


def _norms_of_ones(foreach: bool) -> None:
    for order, expected in ((2.0, math.sqrt(12)), (1.0, 12.0), (math.inf, 1.0)):
        parameters = _ones_in_padded_memory()
        with CommDebugMode() as traffic:
            total = clip_grad_norm_(parameters, expected / 2, order, foreach=foreach)
        assert traffic.get_total_counts() == 1
        assert total.full_tensor().item() == pytest.approx(expected, rel=1e-6)
        assert parameters[2].grad is None
        for parameter in parameters[:2]:
            torch.testing.assert_close(parameter.grad.full_tensor(), torch.full(parameter.shape, 0.5))


@pytest.mark.parametrize("foreach", [True, False])
def test_padding_empty_shards_and_missing_gradients(foreach: bool) -> None:
    run_ranks(_norms_of_ones, 3, 60, foreach)


def _as_fsdp2(foreach: bool) -> None:
    mesh = world_mesh()
    shapes = [(5, 3), (7,), (2, 3, 5)]
    for order in ORDERS:
        fulls = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
        stock = [_with_gradient(distribute_tensor(f, mesh, [Shard(0)]), distribute_tensor(f, mesh, [Shard(0)])) for f in fulls]
        ours = [_with_gradient(ragged(f), ragged(f)) for f in fulls]
        plain = [_with_gradient(f, f.clone()) for f in fulls]
        counts, totals = [], []
        for parameters in (stock, ours):
            with CommDebugMode() as traffic:
                totals.append(clip_grad_norm_(parameters, 0.1, order, foreach=foreach))
            counts.append(traffic.get_total_counts())
        expected = clip_grad_norm_(plain, 0.1, order, foreach=foreach)
        assert counts == [1, 1]
        assert type(totals[1]) is type(totals[0]) is DTensor
        assert totals[1].placements == totals[0].placements
        assert totals[1].dtype == totals[0].dtype
        torch.testing.assert_close(totals[1].full_tensor(), expected)
        for p, q in zip(plain, ours, strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_is_as_with_fsdp2(foreach: bool) -> None:
    run_ranks(_as_fsdp2, 2, 60, foreach)


def _single_norms() -> None:
    full = torch.randn(5, 3)
    tensor = ragged(full)
    for order in ORDERS:
        expected = torch.linalg.vector_norm(full, order)
        torch.testing.assert_close(torch.linalg.vector_norm(tensor, order).full_tensor(), expected)
        torch.testing.assert_close(get_total_norm([tensor], order).full_tensor(), get_total_norm([full], order))
    for norm in (tensor.norm(), torch.norm(tensor), torch.linalg.vector_norm(tensor, dtype=torch.float64)):
        torch.testing.assert_close(norm.full_tensor().float(), full.norm())
    torch.testing.assert_close(torch.norm(tensor, p=1).full_tensor(), full.norm(p=1))
    with pytest.raises(ValueError, match=r"vector_norm.*only the norm over all dims"):
        torch.linalg.vector_norm(tensor, dim=0)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([_with_gradient(tensor, tensor * torch.inf)], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("world", [1, 3])
def test_single_norms(world: int) -> None:
    run_ranks(_single_norms, world)


def _replicated_and_cut() -> None:
    """R5 on a (2, 2) mesh: copies along one dim, pieces along the other; copies do not count twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    tensor = distribute_tensor_ragged(torch.ones(12), mesh, [Replicate(), RaggedShard((0,), (5, 7))], src_data_rank=None)
    for order, expected in ((2.0, math.sqrt(12)), (1.0, 12.0), (math.inf, 1.0)):
        parameter = _with_gradient(tensor.clone(), tensor.clone())
        with CommDebugMode() as traffic:
            total = clip_grad_norm_([parameter], expected / 2, order)
        assert traffic.get_total_counts() == 1
        assert total.full_tensor().item() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((12,), 0.5))


def test_a_mesh_with_copies() -> None:
    run_ranks(_replicated_and_cut, 4)


def _empty_everywhere() -> None:
    tensors = [ragged(torch.zeros(0, 4)), ragged(torch.zeros(()))]
    for order in (1.0, 2.0, math.inf):
        assert get_total_norm(tensors, order).full_tensor().item() == 0.0


def test_tensors_without_elements() -> None:
    run_ranks(_empty_everywhere, 3)
