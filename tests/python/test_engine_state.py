"""State dicts: the unsharded model's keys with sharded values, whole ones on demand, and every way back."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Shapes, Stack, Tied, shard_blocks, shard_children, shard_root
from parity import Twin, batch, make_integer_
from raggedfsdp import Granularity, full_state_dict, load_full_state_dict
from raggedfsdp.tensor import RaggedDTensor
from ranks import run_ranks


class Buffered(Stack):
    """With a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def rows(name: str, shape: torch.Size) -> Granularity:
    return Granularity.rows(2) if len(shape) > 1 else Granularity.elements()


CASES: dict[str, Any] = {
    "stack": (Buffered, shard_blocks(), (2, WIDTH)),
    "tied": (Tied, shard_children("embedding", "head"), None),
    "shapes": (Shapes, shard_root(), (3,)),
    "rows": (Shapes, shard_root(orig_param_policy=rows), (3,)),
}


def trained(name: str) -> Twin:
    make, shard, shape = CASES[name]
    twin = Twin(make, shard)
    twin.train(models.sum_loss, lambda step, rank: batch(step, rank, *shape) if shape else torch.arange(4) + rank, steps=2)
    twin.model.zero_grad()
    twin.oracle.zero_grad()
    return twin


def fresh(name: str, twin: Twin) -> Any:
    """Another model wrapped alike, with other values, in the twin's place."""
    make, shard, _ = CASES[name]
    model = make_integer_(make())
    with twin.traffic.watch():
        shard(model)
    for unit in model.modules():
        if (state := unit.__dict__.get("_ragged_unit")) is not None:
            state.core.divide_factor = 1.0
    return model


def goes_on(name: str, twin: Twin) -> None:
    """What was loaded is what trains."""
    twin.check()
    shape = CASES[name][2]
    twin.train(models.sum_loss, lambda step, rank: batch(step, rank, *shape) if shape else torch.arange(4) + rank, steps=2)


def same_keys(came: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(came) == list(want)
    for key, value in want.items():
        assert came[key].shape == value.shape
        assert came[key].dtype == value.dtype


def _per_rank(name: str) -> None:
    for assign in (False, True):
        twin = trained(name)
        state = twin.model.state_dict()
        same_keys(state, twin.oracle.state_dict())
        assert all(isinstance(state[k], RaggedDTensor) for k, _ in twin.model.named_parameters())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        twin.model = fresh(name, twin)
        assert str(twin.model.load_state_dict(loaded, assign=assign)) == "<All keys matched successfully>"
        goes_on(name, twin)


def _strict() -> None:
    twin = trained("stack")
    state = twin.model.state_dict()
    removed = state.pop("scale")
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.model.load_state_dict(state)
    state |= {"scale": removed, "more": removed}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        twin.model.load_state_dict(state)
    twin.model.load_state_dict(state, strict=False)
    goes_on("stack", twin)


def _whole(name: str) -> None:
    twin = trained(name)
    want = twin.oracle.state_dict()
    whole = full_state_dict(twin.model)
    same_keys(whole, want)
    for key, value in want.items():
        assert type(whole[key]) is torch.Tensor
        assert torch.equal(whole[key], value), key
    CASES[name][0]().load_state_dict(whole)
    first_only = full_state_dict(twin.model, rank0_only=True)
    assert (list(first_only) == list(want)) if dist.get_rank() == 0 else not first_only
    for rank0_only, state in ((False, whole), (True, first_only)):
        twin.model = fresh(name, twin)
        load_full_state_dict(twin.model, state, rank0_only=rank0_only)
        twin.check()
    for assign in (False, True):
        twin.model = fresh(name, twin)
        twin.model.load_state_dict(
            {k: nn.Parameter(v) if assign and v.is_floating_point() else v for k, v in whole.items()}, assign=assign
        )
        with torch.no_grad():  # the next use adopts what was assigned
            shape = CASES[name][2]
            twin.model(batch(0, 0, *shape) if shape else torch.arange(4))
        twin.check()
    goes_on(name, twin)


def _rank0_errors() -> None:
    twin = trained("stack")
    whole = full_state_dict(twin.model, rank0_only=True)
    whole.pop("scale", None)
    with pytest.raises(ValueError, match="no values for scale"):
        load_full_state_dict(twin.model, whole, rank0_only=True)
    load_full_state_dict(twin.model, whole, rank0_only=True, strict=False)
    if twin.rank == 0:
        whole["scale"] = torch.ones(2)
    with pytest.raises(ValueError, match="'scale' must have shape"):
        load_full_state_dict(twin.model, whole, rank0_only=True)
    goes_on("stack", twin)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_round_trips(name: str, world: int) -> None:
    run_ranks(_per_rank, world, 60, name)
    run_ranks(_whole, world, 60, name)


@pytest.mark.parametrize("world", [1, 3])
def test_wrong_state_dicts(world: int) -> None:
    run_ranks(_strict, world, 60)
    run_ranks(_rank0_errors, world, 60)


def _made_before() -> None:
    """An optimiser over the original parameters would silently train nothing."""
    model = Stack()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    shard_blocks()(model)
    model(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match="as it was before fully_shard"):
        optimiser.step()


@pytest.mark.parametrize("world", [1, 2])
def test_optimiser_made_before_wrapping_raises(world: int) -> None:
    run_ranks(_made_before, world, 60)
