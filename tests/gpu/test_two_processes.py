"""Two processes share the GPU, with gloo between them: shards, gathers and reductions of CUDA tensors, the oracle's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_support import CudaTwin, cuda_mesh, rows

import models_for_tests as models
from models_for_tests import WIDTH, Adapter, Branches, Stack, shard_blocks, shard_root
from ranks import run_ranks


def _can() -> str:
    """Why gloo cannot do it here, or nothing."""
    torch.cuda.set_device(0)
    try:
        whole, part = torch.ones(4, device="cuda"), torch.ones(2, device="cuda")
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_reduce(torch.ones(3, dtype=torch.uint8, device="cuda"), dist.ReduceOp.MAX)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.fixture(scope="module")
def gloo() -> None:
    why = next(filter(None, run_ranks(_can, 2, 100)), "")
    if why:
        pytest.skip(f"gloo of torch {torch.__version__} cannot send CUDA tensors: {why}")


def _trains() -> None:
    mesh = cuda_mesh("gloo")
    for reshard in (True, False):
        options = {"mesh": mesh, "reshard_after_forward": reshard}
        CudaTwin(Stack, shard_blocks(**options)).train(models.weighted_loss, lambda step, rank: rows(step, rank))
        CudaTwin(Adapter, shard_root(**options)).train(models.weighted_loss, lambda step, rank: rows(step, rank, 3, 8))


def _accumulates() -> None:
    mesh = cuda_mesh("gloo")
    for divide, syncs in itertools.product((1.0, None), ([0, 0, 1], [1, 0, 1])):
        twin = CudaTwin(Stack, shard_blocks(mesh=mesh), divide=divide, tolerance=0.0 if divide else 1e-6)
        for step, sync in enumerate(syncs):
            twin.model.set_requires_gradient_sync(bool(sync))
            twin.backward(models.weighted_loss, lambda rank, step=step: rows(step, rank))
        twin.check()


def _unused() -> None:
    """Parameters that only one rank uses, or nobody."""
    mesh = cuda_mesh("gloo")
    twin = CudaTwin(Branches, shard_root(mesh=mesh))
    for step, plan in enumerate((["a", "b"], ["ab", "a"], ["b", "b"])):
        args = lambda rank, step=step, plan=plan: (rows(step, rank, 2, WIDTH), plan[rank])  # noqa: E731
        twin.backward(lambda model, a: model(*a).sum(), args)
        twin.check()
        assert twin.model.layers["c"].weight.grad is None


def _clips() -> None:
    mesh = cuda_mesh("gloo")
    twin = CudaTwin(Stack, shard_blocks(mesh=mesh), tolerance=1e-5)
    twin.backward(models.weighted_loss, lambda rank: rows(0, rank))
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (twin.model, twin.oracle)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-5, atol=0)
    twin.check()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("body", [_trains, _accumulates, _unused, _clips], ids=lambda body: body.__name__[1:])
def test_two_processes(body: Any) -> None:
    run_ranks(body, 2, 110)
