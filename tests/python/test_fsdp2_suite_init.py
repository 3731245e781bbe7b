"""What FSDP2's own tests ask of wrapping: meshes, ignored parameters, placements, and what state dicts share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import models_for_tests as models
from models_for_tests import WIDTH, Block, Stack, shard_blocks
from parity import Twin, batch
from raggedfsdp import UsageError, fully_shard
from raggedfsdp.tensor import RaggedDTensor
from ranks import run_ranks

# --- meshes ---


def trained(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """Parameters and gradients after a step on the ranks of a mesh."""
    torch.manual_seed(1)
    model: Any = Stack(2)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank()
    models.weighted_loss(model, batch(0, rank, 2, WIDTH)).backward()
    torch.optim.SGD(model.parameters(), 1 / 32).step()
    return [t.full_tensor() for p in model.parameters() for t in (p, p.grad)]


def unsharded(ranks: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Stack(2)
    for rank in range(ranks):
        (models.weighted_loss(model, batch(0, rank, 2, WIDTH)) / ranks).backward()
    torch.optim.SGD(model.parameters(), 1 / 32).step()
    return [t for p in model.parameters() for t in (p, p.grad)]  # type: ignore[misc]


def _meshes(world: int) -> None:
    """A dim of a larger mesh, one made from a group, one of a single rank."""
    world_mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    group = grid["inner"].get_group()
    ranks = dist.get_process_group_ranks(group)
    from_group = DeviceMesh.from_group(group, "cpu", ranks, mesh_dim_names=("dp",))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("a", "b"))["b"]
    for mesh, ranks in ((grid["inner"], world // 2), (from_group, world // 2), (None, world), (world_mesh, world), (alone, 1)):
        for came, want in zip(trained(mesh), unsharded(ranks), strict=True):
            assert torch.equal(came, want)
    with pytest.raises(NotImplementedError, match="1-D mesh"):
        fully_shard(nn.Linear(2, 2), mesh=grid)
    two: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(two[0], mesh=grid["inner"])
    if world > 2:
        with pytest.raises(UsageError, match="another mesh"):
            fully_shard(two, mesh=world_mesh)


@pytest.mark.parametrize("world", [2, 4])
def test_meshes(world: int) -> None:
    run_ranks(_meshes, world, 60, world)


# --- parameters left alone ---


def _ignored() -> None:
    model = Stack(2)
    oracle = copy.deepcopy(model)
    ignored = {*model.first.parameters(), model.blocks[0].up.weight}
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    for name, p in model.named_parameters():
        assert isinstance(p, RaggedDTensor) != (p in ignored), name
    x = batch(0, dist.get_rank(), 2, WIDTH)
    for m in (model, oracle):
        models.weighted_loss(m, x).backward()
    own = dict(oracle.named_parameters())
    for name, p in model.named_parameters():
        if p in ignored:
            assert torch.equal(p.grad, own[name].grad), f"{name}: reduced though it was to be left alone"
    state = model.state_dict()
    assert list(state) == list(oracle.state_dict())
    assert type(state["first.weight"]) is torch.Tensor


class Mixed(nn.Module):
    """A replicated layer, a sharded block, a replicated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x).clamp(-4, 4)))


def _inside_ddp() -> None:
    """A unit inside a model that is replicated otherwise."""
    oracle = Mixed()
    model: Any = copy.deepcopy(oracle)
    fully_shard(model.block)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, RaggedDTensor)]
    assert len(sharded) == 3
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    replicated = DistributedDataParallel(model)
    world = dist.get_world_size()
    for step in range(2):
        for rank in range(world):
            (models.weighted_loss(oracle, batch(step, rank, 2, WIDTH)) / world).backward()
        models.weighted_loss(replicated, batch(step, dist.get_rank(), 2, WIDTH)).backward()
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            gradient = p.grad.full_tensor() if isinstance(p, RaggedDTensor) else p.grad
            torch.testing.assert_close(gradient, q.grad, msg=name)
        for m in (model, oracle):
            torch.optim.SGD(m.parameters(), 1 / 32, foreach=False).step()
            m.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_left_alone(world: int) -> None:
    run_ranks(_ignored, world, 60)
    run_ranks(_inside_ddp, world, 60)


# --- placements ---


def _placements() -> None:
    largest = lambda p: Shard(max(range(p.ndim), key=lambda d: p.shape[d])) if p.ndim else None  # noqa: E731
    for fn in (largest, lambda p: Shard(-1) if p.ndim else None, lambda p: None):
        twin = Twin(Stack, shard_blocks(shard_placement_fn=fn))
        contiguous: list[bool] = []
        handle = twin.model.blocks[0].up.register_forward_pre_hook(
            lambda m, a, seen=contiguous: seen.extend(p.is_contiguous() for p in m.parameters())
        )
        twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
        handle.remove()
        assert contiguous
        assert all(contiguous)
        twin.backward(models.weighted_loss, lambda rank: batch(5, rank, 2, WIDTH))
        assert all(t.is_contiguous() and t.to_local().is_contiguous() for p in twin.model.parameters() for t in (p, p.grad))
    for wrong in (lambda p: Shard(1), lambda p: Shard(-3), lambda p: 1):
        with pytest.raises(UsageError, match="shard_placement_fn returned"):
            fully_shard(nn.Linear(4, 4), shard_placement_fn=wrong)
    tagged: Any = nn.Linear(WIDTH, WIDTH)
    tagged.weight.decay = False
    fully_shard(tagged)
    assert tagged.weight.decay is False
    tagged.unshard()
    assert tagged.weight.decay is False


@pytest.mark.parametrize("world", [1, 3])
def test_placements(world: int) -> None:
    run_ranks(_placements, world, 60)


# --- what state dicts share with the model ---


def pointers(model: nn.Module) -> list[int]:
    return [p._local_tensor.data_ptr() for p in model.parameters()]


def _shared() -> None:
    """A state dict shows the parameters' own memory, and loading writes into it, whatever was gathered before."""
    for reshard in (True, False):
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
        before = pointers(twin.model)
        state = twin.model.state_dict()
        for step in range(2):
            twin.train(models.weighted_loss, lambda s, rank, step=step: batch(step, rank, 2, WIDTH), steps=1)
            assert pointers(twin.model) == before
            assert [state[name]._local_tensor.data_ptr() for name, _ in twin.model.named_parameters()] == before
        twin.model(batch(0, 0, 2, WIDTH))  # kept afterwards, where that is asked for
        again = twin.model.state_dict()
        assert all(torch.equal(again[key]._local_tensor, state[key]._local_tensor) for key in state)
        twin.model.load_state_dict({key: torch.full_like(value, 7) for key, value in state.items()})
        assert pointers(twin.model) == before
        assert all(bool((p._local_tensor == 7).all()) for p in twin.model.parameters())


def _failed_conversion() -> None:
    """A conversion that fails in the middle leaves a model that can be converted and used."""
    twin = Twin(lambda: Stack(2), shard_blocks())
    calls = 0

    def fail_at_the_third(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("in the middle")
        return tensor.double()

    with pytest.raises(RuntimeError, match="in the middle"):
        twin.model._apply(fail_at_the_third)
    twin.model.float()
    twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_and_conversions(world: int) -> None:
    run_ranks(_shared, world, 60)
    run_ranks(_failed_conversion, world, 60)
