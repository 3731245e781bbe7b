"""What operations do on a ragged tensor: run on the piece, gather when told to, or are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from raggedfsdp import _C
from raggedfsdp.tensor import RaggedDTensor, RaggedShard, gathering
from ranks import run_ranks
from tensor_cases import ragged, world_mesh

SHAPES = [(), (0, 4), (1, 17), (5, 3)]

ELEMENT_WISE: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.mul,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: 2 - x,
    lambda x, y: x.lerp(y, 0.25),
    lambda x, y: x.addcmul(y, y, value=0.5),
    lambda x, y: x.addcdiv(y, y.square() + 1),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.where(x > 0, x, 0.0),
    lambda x, y: x.clamp(-0.5, 0.5).sqrt().nan_to_num(7.0),
    lambda x, y: torch.maximum(x, y).sign(),
    lambda x, y: (x == y) | x.isfinite(),
    lambda x, y: x.masked_fill(y > 0, 3.0).masked_fill_(y < -1, torch.tensor(2.0)),
    lambda x, y: torch.zeros_like(x).add_(torch.ones_like(y)).sub_(torch.full_like(x, 0.5)),
    lambda x, y: x.to(torch.bfloat16) * y.to(torch.bfloat16),
    lambda x, y: x.double().pow(2),
    lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    lambda x, y: x * torch.tensor(3.0),
    lambda x, y: x.view_as(y).expand_as(y).detach().contiguous().clone(),
    lambda x, y: x.new_zeros(y.shape) + y.new_full(x.shape, 2.0),
    lambda x, y: torch._foreach_add([x, y], [y, x])[1],
    lambda x, y: torch._foreach_sqrt(torch._foreach_mul([x, y], torch.tensor(2.0)))[0].nan_to_num(),
]


def _matches() -> None:
    for shape in SHAPES:
        a, b = torch.randn(shape), torch.randn(shape)
        for number, op in enumerate(ELEMENT_WISE):
            expected = op(a, b)
            result = op(ragged(a), ragged(b))
            assert isinstance(result, RaggedDTensor), (number, shape)
            assert result.dtype == expected.dtype, (number, shape)
            assert torch.equal(result.full_tensor(), expected), (number, shape)


@pytest.mark.parametrize("world", [1, 3])
def test_element_wise(world: int) -> None:
    run_ranks(_matches, world)


def _plain_operands() -> None:
    for shape in SHAPES:
        full, other = torch.randn(shape), torch.randn(shape)
        tensor = ragged(full)
        assert torch.equal((tensor + other).full_tensor(), full + other)
        assert torch.equal((other - tensor).full_tensor(), other - full)
        replicated = distribute_tensor(torch.tensor(2.0), world_mesh(), [Replicate()])
        assert torch.equal((tensor * replicated).full_tensor(), full * 2)
        pending = torch.linalg.vector_norm(tensor)
        torch.testing.assert_close((tensor * pending).full_tensor(), full * full.norm())
        mixed = [tensor.clone(), full.clone()]
        torch._foreach_mul_(mixed, 2.0)
        assert torch.equal(mixed[0].full_tensor(), mixed[1])
    replicated = distribute_tensor(torch.ones(2), world_mesh(), [Replicate()])
    with pytest.raises(_C.UsageError, match="other DTensors"):
        torch._foreach_mul_([ragged(torch.ones(2)), replicated], 2.0)
    low = torch.randn((), dtype=torch.bfloat16)
    wide = torch.randn((), dtype=torch.float32)
    assert (ragged(low) * wide).dtype == (low * wide).dtype == torch.float32
    assert (ragged(low.view(1)) * wide).dtype == torch.bfloat16


def test_plain_operands_are_cut() -> None:
    run_ranks(_plain_operands, 3)


def _copies() -> None:
    for shape in SHAPES:
        full = torch.randn(shape)
        target = ragged(torch.zeros(shape))
        memory = target.to_local().data_ptr()
        for source in (full, ragged(full), full.double(), distribute_tensor(full, world_mesh(), [Replicate()])):
            target.zero_()
            assert target.copy_(source) is target
            assert torch.equal(target.full_tensor(), full)
        target.data = ragged(full + 1)
        assert torch.equal(target.full_tensor(), full + 1)
        target.data = full
        assert torch.equal(target.full_tensor(), full)
        assert target.to_local().data_ptr() == memory
        assert torch.equal(target.fill_(torch.tensor(3.0)).full_tensor(), torch.full(shape, 3.0))
    row = torch.arange(3.0)
    assert torch.equal(ragged(torch.zeros(5, 3)).copy_(row).full_tensor(), row.expand(5, 3))
    with pytest.raises(_C.UsageError, match=r"expected torch\.float32"):
        target.data = full.double()


def test_copy_takes_whole_tensors() -> None:
    run_ranks(_copies, 3)


def _versions() -> None:
    """All pieces of a bucket are views of one buffer; its version counter is the bucket's generation."""
    flat = torch.zeros(10)
    cut = RaggedShard((0,), [4] * world_mesh().size())
    pieces = [RaggedDTensor.from_shard(flat[i : i + 4], world_mesh(), [cut], (4 * world_mesh().size(),)) for i in (0, 5)]
    parameters = [torch.nn.Parameter(p) for p in pieces]
    assert parameters[0].to_local().data_ptr() == flat.data_ptr()
    for p in parameters:
        p.grad = p.detach().with_local(torch.ones(4))
    reads = [lambda: pieces[0] + 1, lambda: torch._foreach_neg(pieces), lambda: repr(pieces), lambda: pieces[0].norm()]
    mutations: list[Callable[[], Any]] = [
        lambda: pieces[0].add_(1),
        lambda: pieces[1].copy_(torch.ones(4 * world_mesh().size())),
        lambda: pieces[0].zero_(),
        lambda: pieces[0].detach().mul_(2),
        lambda: pieces[0].data.mul_(2),
        lambda: pieces[0].normal_(),
        lambda: torch._foreach_mul_(pieces, 2.0),
        lambda: torch._foreach_copy_(pieces, [p.clone() for p in pieces]),
        lambda: torch.mul(pieces[0], 2, out=pieces[1]),
        lambda: setattr(pieces[0], "data", pieces[1]),
        lambda: pieces[0].__setitem__(pieces[0] > 0, 1.0),
        *[
            torch.optim.AdamW(parameters, lr=0.1, **mode).step
            for mode in ({"foreach": False}, {"foreach": True}, {"fused": True})
        ],
        torch.optim.SGD(parameters, lr=0.1, fused=True).step,
    ]
    for read in reads:
        before = flat._version
        read()
        assert flat._version == before
    for number, mutate in enumerate(mutations):
        before = flat._version
        with torch.no_grad():
            mutate()
        assert flat._version > before, number
    with torch.inference_mode():
        before = flat._version
        pieces[0].mul_(2)
        torch._foreach_add_(pieces, 1.0)
        assert flat._version >= before + 2
    with gathering(), torch.no_grad():
        before = flat._version
        pieces[0].cumsum_(0)
        assert flat._version > before
    assert not torch.any(flat[4:5])


@pytest.mark.parametrize("world", [1, 2])
def test_mutations_count_in_the_flat_buffer(world: int) -> None:
    run_ranks(_versions, world)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.sum": lambda x: x.sum(),
    "aten.mean": lambda x: x.mean(),
    "aten.mm": lambda x: x @ torch.ones(3, 2),
    "aten.t": lambda x: x.t(),
    "aten.view": lambda x: x.view(-1),
    "aten.select": lambda x: x[0],
    "aten.cat": lambda x: torch.cat([x, x]),
    "aten.max": lambda x: x.max(),
    "aten.any": lambda x: x.isnan().any(0),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten._local_scalar_dense": lambda x: ragged(torch.ones(())).item(),
    "aten.add.Tensor": lambda x: x + torch.ones(3),
    "aten.mul.Tensor": lambda x: x * ragged(torch.ones(5, 3), 1),
    "aten.copy_": lambda x: torch.ones(5, 3).copy_(x),
    "aten.cumsum": lambda x: x.cumsum(0),
    "aten.sort": lambda x: x.sort(),
    "aten.linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "aten.bernoulli_": lambda x: x.bernoulli_(torch.ones(5, 3)),
    "aten._foreach_max": lambda x: torch._foreach_max([x]),
    "aten.std": lambda x: x.std(),
}


def _refusal(op: Callable[[Any], Any], tensor: RaggedDTensor) -> str:
    try:
        op(tensor)
    except _C.UsageError as error:
        return str(error)
    return ""


def _refused() -> None:
    full = torch.randn(5, 3)
    tensor = ragged(full)
    for name, op in REFUSED.items():
        with CommDebugMode() as traffic:
            message = _refusal(op, tensor)
        assert "full_tensor()" in message, name
        assert "gathering()" in message, name
        assert traffic.get_total_counts() == 0
    for name in ("aten.sum", "aten.mm", "aten.select", "aten.equal"):
        with pytest.raises(_C.UsageError, match=name):
            REFUSED[name](tensor)
    assert torch.equal(tensor.full_tensor(), full)


def test_everything_else_is_refused_by_name() -> None:
    run_ranks(_refused, 2)


def _gathered() -> None:
    full = torch.randn(5, 3)
    tensor = ragged(full)
    with gathering():
        assert torch.equal(tensor.sum(), full.sum())
        assert torch.equal(torch.ones(2, 5) @ tensor, torch.ones(2, 5) @ full)
        assert torch.equal(torch.nn.functional.linear(torch.ones(2, 3), tensor), torch.ones(2, 3) @ full.t())
        assert torch.equal(tensor[1:3], full[1:3])
        assert torch.equal(torch.cat([tensor, tensor]), torch.cat([full, full]))
        assert torch.equal(torch.ones(5, 3).copy_(tensor), full)
        assert torch.equal(tensor, tensor.clone())
        assert ragged(torch.tensor(4.0)).item() == 4.0
        assert tensor.cumsum_(0) is tensor
        for write in (lambda: tensor.view(-1).zero_(), lambda: tensor[0].fill_(1.0)):
            with pytest.raises(_C.UsageError, match="it would be lost"):
                write()
        with pytest.raises(_C.UsageError, match="shape"):
            tensor.t_()
        with pytest.raises(_C.UsageError, match="not differentiable"):
            torch.nn.Parameter(tensor).sum()
    assert torch.equal(tensor.full_tensor(), full.cumsum(0))
    with pytest.raises(_C.UsageError):
        tensor.sum()


@pytest.mark.parametrize("world", [1, 3])
def test_gathers_when_told_to(world: int) -> None:
    run_ranks(_gathered, world)


def _any_and_all() -> None:
    for index in range(6):
        full = torch.zeros(6).index_fill_(0, torch.tensor([index]), 1.0)
        assert ragged(full).any().item() is True
        assert ragged(1 - full).all().item() is False
        assert not (ragged(full) > 1).any()
        assert (ragged(full) <= 1).all()
    assert not ragged(torch.zeros(0)).any()
    assert ragged(torch.zeros(0)).all()


def test_any_and_all_are_agreed() -> None:
    run_ranks(_any_and_all, 3)


def _repr_on_one_rank() -> str:
    tensor = ragged(torch.tensor(1.0)) if dist.get_rank() else torch.nn.Parameter(ragged(torch.ones(5, 3)))
    return f"{tensor}" + str(tensor) + repr([tensor])


def test_repr_never_communicates() -> None:
    """Every rank prints another tensor: a collective inside would hang or mix them up."""
    texts = run_ranks(_repr_on_one_rank, 2, 30)
    assert all(text.count("RaggedDTensor(shape=") == 3 for text in texts)


def _is_a_dtensor() -> None:
    tensor = ragged(torch.ones(5, 3))
    assert isinstance(tensor, DTensor)
    assert isinstance(tensor.placements[0], torch.distributed.tensor.Placement)
    assert tensor.device_mesh == world_mesh()
    assert tensor.to_local() is tensor._local_tensor
    assert tensor.detach()._local_tensor is tensor._local_tensor
    assert sum(tensor.extents.numels) == 15


def test_is_a_dtensor() -> None:
    run_ranks(_is_a_dtensor, 2)
