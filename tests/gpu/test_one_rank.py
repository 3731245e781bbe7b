"""One rank on the GPU, over an NCCL group: the oracle's numbers. With one rank nothing is sent; memory, streams and dtypes are
the device's all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_support import DEVICE, CudaTwin, cuda_mesh, rows
from torch import nn

import models_for_tests as models
from models_for_tests import WIDTH, Adapter, Stack, Tied, shard_blocks, shard_children, shard_root
from raggedfsdp import MixedPrecisionPolicy, full_state_dict, load_full_state_dict
from ranks import run_ranks
from test_engine_checkpointing import Segments

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")


def _wrappings() -> None:
    mesh = cuda_mesh("nccl")
    cases: list[tuple[Callable[[], nn.Module], Callable[..., Any], Any]] = [
        (Stack, shard_root, lambda step, rank: rows(step, rank)),
        (Stack, shard_blocks, lambda step, rank: rows(step, rank)),
        (Adapter, shard_root, lambda step, rank: rows(step, rank, 3, 8)),
        (
            Tied,
            lambda **o: shard_children("embedding", "body", "head", **o),
            lambda step, rank: (torch.arange(4) + step).to(DEVICE),
        ),
    ]
    for (make, shard, x), reshard in itertools.product(cases, (True, False, None)):
        CudaTwin(make, shard(mesh=mesh, reshard_after_forward=reshard)).train(models.weighted_loss, x)


def _modes() -> None:
    mesh = cuda_mesh("nccl")
    for kind in ("reentrant", "non-reentrant"):
        twin = CudaTwin(
            lambda kind=kind: Segments(kind, "01 23"), shard_children("blocks.0", "blocks.1", "blocks.2", mesh=mesh)
        )
        twin.train(models.weighted_loss, lambda step, rank: rows(step, rank).requires_grad_())
    twin = CudaTwin(Stack, shard_blocks(mesh=mesh))
    for step in range(4):
        twin.model.set_requires_gradient_sync(step % 2 == 1)
        twin.backward(models.weighted_loss, lambda rank, step=step: rows(step, rank))
        if step % 2 == 1:
            twin.check()
    with torch.no_grad():
        twin.same("evaluation", twin.model(rows(9, 0)), twin.oracle(rows(9, 0)))
    loss = lambda m, x: models.weighted_loss(m, x) + models.weighted_loss(m, x + 1)  # noqa: E731
    twin.backward(loss, lambda rank: rows(5, rank))
    twin.check()


def _optimisers() -> None:
    mesh = cuda_mesh("nccl")
    options: list[dict[str, bool]] = [{"fused": True}, {"foreach": True}, {"foreach": False}]
    for option in options:
        twin = CudaTwin(lambda: Stack().double(), shard_blocks(mesh=mesh), tolerance=1e-9)
        both = (twin.model, twin.oracle)
        optimisers = [torch.optim.AdamW(m.parameters(), 0.01, **option) for m in both]
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
        for step in range(4):
            scaler.scale(models.weighted_loss(twin.model, rows(step, 0).double())).backward()
            models.weighted_loss(twin.oracle, rows(step, 0).double()).backward()
            scaler.unscale_(optimisers[0])
            for m in both:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimisers[0])
            scaler.update()
            optimisers[1].step()
            for m in both:
                m.zero_grad()
            twin.check()


def _moved_and_saved() -> None:
    """A model made on the CPU is moved as it is sharded, buffers included; its state dict comes back whole."""
    mesh = cuda_mesh("nccl")
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    want = {k: v.clone() for k, v in model.state_dict().items()}
    shard_children("0", mesh=mesh)(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    whole = full_state_dict(model)
    assert all(torch.equal(whole[k].cpu(), v) for k, v in want.items())
    load_full_state_dict(model, {k: v + 1 for k, v in want.items()})
    model.unshard()
    leaf = model[2].weight
    assert leaf.is_cuda
    assert torch.equal(leaf.cpu(), want["2.weight"] + 1)
    model.reshard()
    with pytest.raises(RuntimeError, match="released"):
        leaf.sum()
    out = model(torch.randn(4, WIDTH))  # inputs come along too
    assert out.is_cuda
    out.sum().backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())


def _precision() -> None:
    """bf16 compute beside fp32: close, in the dtypes that were asked for."""
    mesh = cuda_mesh("nccl")
    for reduce_dtype in (torch.float32, None):
        twin = CudaTwin(Stack, shard_blocks(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)))
        out = twin.model(rows(0, 0))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        twin.oracle(rows(0, 0)).sum().backward()
        for name, p, q in twin.pairs():
            assert p.grad.dtype == torch.float32, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=0.5, msg=name)
        twin.check_rest()


@pytest.mark.parametrize("body", [_wrappings, _modes, _optimisers, _moved_and_saved, _precision], ids=lambda b: b.__name__[1:])
def test_one_rank(body: Any) -> None:
    run_ranks(body, 1, 110)
