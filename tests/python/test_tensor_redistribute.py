"""Cutting and gathering: the whole tensor is the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from raggedfsdp import _C
from raggedfsdp.tensor import Granularity, RaggedDTensor, RaggedShard, distribute_tensor
from ranks import run_ranks
from tensor_cases import by_elements, ragged, world_mesh

WORLDS = [1, 2, 3, 4]
# G2 (dim 0 smaller than the world, empty), G4 (0-d), odd and prime sizes
SHAPES = [(), (0, 4), (1, 17), (5, 3), (7,), (2, 3, 5)]


def _whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def _gather_is_the_inverse() -> None:
    for shape in SHAPES:
        for seed in range(3):
            full = _whole(shape)
            tensor = ragged(full, seed)
            assert tensor.shape == full.shape
            assert tensor.to_local().dim() == 1
            assert torch.equal(tensor.full_tensor(), full)
            gathered = tensor.redistribute(placements=[Replicate()])
            assert gathered.placements == (Replicate(),)
            assert torch.equal(gathered.to_local(), full)


@pytest.mark.parametrize("world", WORLDS)
def test_gather_is_the_inverse(world: int) -> None:
    run_ranks(_gather_is_the_inverse, world)


def _moves_between_cuts() -> None:
    mesh = world_mesh()
    for shape in SHAPES:
        full = _whole(shape)
        source = ragged(full)
        targets = [by_elements(shape, mesh.size(), seed) for seed in (1, 2)]
        targets += [RaggedShard((), [int(r == owner) for r in range(mesh.size())]) for owner in range(mesh.size())]
        for target in targets:
            moved = source.redistribute(placements=[target])
            expected = distribute_tensor(full, mesh, target, src_data_rank=None)
            assert torch.equal(moved.to_local(), expected.to_local())
            assert torch.equal(moved.full_tensor(), full)


@pytest.mark.parametrize("world", WORLDS)
def test_moves_between_any_cuts(world: int) -> None:
    run_ranks(_moves_between_cuts, world)


def _values_come_from_one_rank() -> None:
    mesh = world_mesh()
    full = _whole((5, 3)) + 100 * dist.get_rank()
    for source in range(mesh.size()):
        tensor = distribute_tensor(full, mesh, by_elements((5, 3), mesh.size()), src_data_rank=source)
        assert torch.equal(tensor.full_tensor(), _whole((5, 3)) + 100 * source)


@pytest.mark.parametrize("world", [1, 3])
def test_distribute_takes_the_values_of_the_source_rank(world: int) -> None:
    run_ranks(_values_come_from_one_rank, world)


def _dtensors_are_cut() -> None:
    mesh, rank = world_mesh(), dist.get_rank()
    for shape in SHAPES:
        full = _whole(shape)
        for cut in (by_elements(shape, mesh.size()), RaggedShard((), [int(r == mesh.size() - 1) for r in range(mesh.size())])):
            replicated = DTensor.from_local(full, mesh, [Replicate()])
            assert torch.equal(distribute_tensor(replicated, mesh, cut).full_tensor(), full)
            scales = [r + 1 for r in range(mesh.size())]
            for op, total in (("sum", sum(scales)), ("max", max(scales)), ("min", 1)):
                partial = DTensor.from_local(full * scales[rank], mesh, [Partial(op)])
                assert torch.equal(distribute_tensor(partial, mesh, cut).full_tensor(), full * total)
    with pytest.raises(_C.UsageError, match="redistribute"):
        distribute_tensor(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]), mesh, by_elements((6, 3), 3))


def test_cuts_replicated_and_partial_dtensors() -> None:
    run_ranks(_dtensors_are_cut, 3)


def _from_local_message(odd: str) -> str:
    mesh = world_mesh()
    rank = dist.get_rank()
    placement = RaggedShard((0,), (1, 0, 3))
    local = torch.zeros([3, 0, 9][rank])
    shape = (4, 3)
    if rank == 1:
        local = {"length": torch.zeros(2), "dims": torch.zeros(0, 1), "dtype": torch.zeros(0).double()}.get(odd, local)
        placement = {"placement": RaggedShard((0,), (1, 1, 3)), "other cut": RaggedShard((0,), (2, 0, 2))}.get(odd, placement)
        shape = {"shape": (4, 6)}.get(odd, shape)
    with pytest.raises(_C.UsageError) as caught:
        RaggedDTensor.from_local(local, mesh, [placement], shape=shape)
    return str(caught.value)


@pytest.mark.parametrize("odd", ["length", "dims", "dtype", "placement", "other cut", "shape"])
def test_from_local_fails_alike_on_all_ranks(odd: str) -> None:
    """G3: one rank passed something else; nobody hangs, everybody reads which rank."""
    messages = run_ranks(_from_local_message, 3, 60, odd)
    assert all("rank(s) [1]" in message for message in messages)
    if odd != "placement":  # there the odd rank alone knows the details
        assert len(set(messages)) == 1


def _from_local_is_differentiable() -> None:
    mesh = world_mesh()
    rank = dist.get_rank()
    local = torch.ones([3, 0, 9][rank], requires_grad=True)
    tensor = RaggedDTensor.from_local(
        local * 2, mesh, [RaggedShard((0,), (1, 0, 3))], shape=(4, 3), granularity=Granularity.rows(1)
    )
    assert tensor.granularity == Granularity.rows(1)
    weights = torch.arange(12.0).view(4, 3)
    (tensor.full_tensor() * weights).sum().backward()
    expected = (2 * weights).view(-1)[[0, 3, 3][rank] :][: local.numel()]
    assert torch.equal(local.grad, expected)
    tensor = ragged(weights).requires_grad_()
    moved = tensor.redistribute(placements=[by_elements((4, 3), 3, 7)])
    (moved * 3).to_local().backward(torch.ones_like(moved.to_local()))
    assert isinstance(tensor.grad, RaggedDTensor)
    assert torch.equal(tensor.grad.full_tensor(), torch.full((4, 3), 3.0))
    whole = torch.arange(1.0, 13.0).view(4, 3).requires_grad_()
    tensor = ragged(whole.detach()).requires_grad_()
    (whole.square().sum() + whole.norm()).backward()
    ((tensor * tensor).full_tensor().sum() + tensor.norm().full_tensor()).backward()
    torch.testing.assert_close(tensor.grad.full_tensor(), whole.grad)


def test_gradients_flow_through() -> None:
    run_ranks(_from_local_is_differentiable, 3)


def _refusals() -> None:
    mesh = world_mesh()
    tensor = ragged(_whole((4, 3)))
    for placements in ([RaggedShard((0,), (1, 3))], [RaggedShard((0,), (1, 1, 1, 1, 0))]):
        with pytest.raises(_C.UsageError, match=r"local_units|ranks"):
            tensor.redistribute(placements=placements)
    with pytest.raises(_C.UsageError, match="expected placements on the tensor's own mesh"):
        tensor.redistribute(placements=None)
    with pytest.raises(_C.UsageError, match="exactly one of them a RaggedShard"):
        distribute_tensor(torch.zeros(3), mesh, [Replicate()])


def test_refuses_what_does_not_fit() -> None:
    run_ranks(_refusals, 3)
