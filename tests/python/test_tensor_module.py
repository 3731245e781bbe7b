"""Ragged parameters inside modules: conversion, initialisation, copies, files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raggedfsdp import _C
from raggedfsdp.tensor import Granularity, RaggedDTensor, RaggedShard, distribute_tensor, initialize_
from ranks import run_ranks
from tensor_cases import by_elements, ragged, world_mesh

SHAPES = {"scalar": (), "empty": (0, 4), "row": (1, 17), "matrix": (5, 3), "kernel": (4, 2, 3)}


class Bag(nn.Module):
    """One parameter per shape."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            full = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            self.register_parameter(name, nn.Parameter(ragged(full) if cut else full))


def _assert_same(whole: nn.Module, cut: nn.Module) -> None:
    for name, parameter in whole.named_parameters():
        ours = getattr(cut, name)
        assert isinstance(ours, RaggedDTensor)
        assert isinstance(ours, nn.Parameter)
        assert (ours.dtype, ours.requires_grad, ours.shape) == (parameter.dtype, parameter.requires_grad, parameter.shape)
        assert torch.equal(ours.full_tensor(), parameter), name


def _conversions() -> None:
    whole, cut = Bag(False), Bag(True)
    cut.matrix.requires_grad_(False)
    whole.matrix.requires_grad_(False)
    for p, q in zip(whole.parameters(), cut.parameters(), strict=True):
        p.grad = torch.ones_like(p)
        q.grad = ragged(torch.ones(p.shape))
    conversions: list[Callable[[nn.Module], Any]] = [
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.float(),
        lambda m: m.to("cpu"),
        lambda m: m._apply(lambda t: t * 2),
    ]
    for convert in conversions:
        identities = [id(p) for p in cut.parameters()]
        convert(whole)
        convert(cut)
        _assert_same(whole, cut)
        assert [id(p) for p in cut.parameters()] == identities
        for p, q in zip(whole.parameters(), cut.parameters(), strict=True):
            assert q.grad.dtype == p.grad.dtype
            assert torch.equal(q.grad.full_tensor(), p.grad)
    cut.to("meta")
    assert all(p.is_meta and p.to_local().is_meta for p in cut.parameters())
    cut.to_empty(device="cpu")
    assert not any(p.is_meta for p in cut.parameters())
    cut.load_state_dict(whole.state_dict())
    _assert_same(whole, cut)


@pytest.mark.parametrize("world", [1, 3])
def test_module_conversions(world: int) -> None:
    run_ranks(_conversions, world)


def _state_dicts() -> None:
    whole, cut = Bag(False), Bag(True)
    state = cut.state_dict()
    assert state.keys() == whole.state_dict().keys()
    assert all(isinstance(v, RaggedDTensor) for v in state.values())
    for source in (whole.state_dict(), Bag(True).state_dict()):
        for assign in (False, True):
            target = Bag(True)
            for p in target.parameters():
                p.data.zero_()
            if assign and source is not state and not isinstance(source["matrix"], RaggedDTensor):
                continue  # assigning whole tensors makes them whole parameters, as torch says
            target.load_state_dict(source, strict=True, assign=assign)
            _assert_same(whole, target)


def test_state_dicts_load() -> None:
    run_ranks(_state_dicts, 3)


def _copies() -> None:
    whole, cut = Bag(False), Bag(True)
    cut.matrix.granularity_note = "kept"
    cut.matrix._ragged_owner = lambda: None  # neither copied nor pickled, which it could not be
    for p in cut.parameters():
        p.grad = p.detach().clone()
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    loaded = Bag(True)
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=True)
    twins = [copy.deepcopy(cut), pickle.loads(pickle.dumps(cut)), loaded]
    for twin in twins:
        _assert_same(whole, twin)
        assert not hasattr(twin.matrix, "_ragged_owner")
        assert twin.matrix.to_local().data_ptr() != cut.matrix.to_local().data_ptr() or not twin.matrix.to_local().numel()
        assert twin.matrix.placements == cut.matrix.placements
    assert twins[0].matrix.granularity_note == twins[1].matrix.granularity_note == "kept"
    assert torch.equal(twins[0].matrix.grad.full_tensor(), whole.matrix)
    with torch.no_grad():
        cut.matrix.zero_()
    for twin in twins:
        _assert_same(whole, twin)
    assert copy.deepcopy([cut.matrix] * 2)[0] is not cut.matrix
    again = copy.deepcopy([cut.matrix] * 2)
    assert again[0] is again[1]


@pytest.mark.parametrize("world", [1, 3])
def test_copies_and_files(world: int) -> None:
    run_ranks(_copies, world)


def _file_holds_the_piece_only() -> None:
    """The piece is a view of a large buffer with poisoned padding, which must not go to the file."""
    memory = torch.full((100_000,), torch.nan)
    world = world_mesh().size()
    piece = memory[10:12].fill_(1.0)
    cut = RaggedShard((0,), [2] * world)
    tensor = RaggedDTensor.from_shard(piece, world_mesh(), [cut], (2 * world,), granularity=Granularity.rows(2))
    file = io.BytesIO()
    torch.save(tensor, file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.granularity == Granularity.rows(2)
    assert copy.deepcopy(tensor).granularity == tensor.clone().granularity == tensor.granularity
    assert loaded.to_local().untyped_storage().nbytes() == 8


def test_files_hold_the_piece_only() -> None:
    run_ranks(_file_holds_the_piece_only, 2)


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda p: nn.init.normal_(p, 1.0, 2.0),
    "uniform_": lambda p: nn.init.uniform_(p, -1.0, 1.0),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.5),
    "trunc_normal_ far": lambda p: nn.init.trunc_normal_(p, std=10.0),
    "zeros_": nn.init.zeros_,
    "ones_": nn.init.ones_,
    "constant_": lambda p: nn.init.constant_(p, 0.25),
    "exponential_": lambda p: p.data.exponential_(),
    "bernoulli_": lambda p: p.data.bernoulli_(0.5),
    "random_": lambda p: p.data.random_(0, 10),
    "randn_like": lambda p: p.data.copy_(torch.randn_like(p)),
    "rand_like": lambda p: p.data.copy_(torch.rand_like(p)),
    "generator": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(5)),
}
MATRIX_INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": lambda p: initialize_(p, nn.init.orthogonal_, gain=2.0),
    "eye_": lambda p: initialize_(p, nn.init.eye_) if p.dim() == 2 else p,
}


def _initialises(seed: int) -> None:
    whole, cut = Bag(False), Bag(True)
    for name, initialise in {**INITIALISERS, **MATRIX_INITIALISERS}.items():
        for p, q in zip(whole.parameters(), cut.parameters(), strict=True):
            if name in MATRIX_INITIALISERS and (p.dim() < 2 or p.numel() == 0):
                continue
            torch.manual_seed(seed)
            initialise(p)
            expected_next = torch.rand(3)
            torch.manual_seed(seed)
            initialise(q)
            assert torch.equal(torch.rand(3), expected_next), f"{name}: the generator went elsewhere"
            assert torch.equal(q.full_tensor(), p), (name, p.shape)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_initialises_as_the_unsharded(world: int) -> None:
    run_ranks(_initialises, world, 60, 11)


def _not_element_wise() -> None:
    tensor = ragged(torch.zeros(3, 5))
    with pytest.raises(_C.UsageError):
        nn.init.orthogonal_(tensor)
    with pytest.raises(_C.UsageError):
        nn.init.eye_(tensor)


def test_other_initialisers_are_refused() -> None:
    run_ranks(_not_element_wise, 2)


def _wide_gradients() -> None:
    """bf16 parameters with fp32 gradients."""
    full = torch.arange(8.0)
    parameter = nn.Parameter(ragged(full.bfloat16()))
    parameter.grad_dtype = None
    parameter.grad = ragged(full)
    assert parameter.grad.dtype == torch.float32
    torch.optim.SGD([parameter], lr=0.5).step()
    assert torch.equal(parameter.full_tensor(), (full / 2).bfloat16())
    twin = copy.deepcopy(parameter)
    assert twin.grad.dtype == torch.float32


def test_fp32_gradients_of_bf16_parameters() -> None:
    run_ranks(_wide_gradients, 2)


def _other_memory_layouts() -> None:
    """G5, as far as the tensor goes: the order of elements is the logical one."""
    for full in (torch.arange(24.0).view(6, 4).t(), torch.arange(48.0).view(2, 4, 3, 2).to(memory_format=torch.channels_last)):
        cut = by_elements(full.shape, world_mesh().size())
        for source in (None, 0):
            tensor = distribute_tensor(full, world_mesh(), cut, src_data_rank=source)
            assert torch.equal(tensor.full_tensor(), full)
            assert torch.equal(torch.zeros_like(tensor).copy_(full).full_tensor(), full)
            assert torch.equal((tensor + full).full_tensor(), 2 * full)


def test_other_memory_layouts() -> None:
    run_ranks(_other_memory_layouts, 3)
