"""Twins on the GPU, and models behind a comm that is late on a stream of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import models_for_tests as models
from models_for_tests import WIDTH
from parity import Twin, batch, round_
from raggedfsdp._state import units_in
from raggedfsdp.comm import wrap_comms

DEVICE = "cuda:0"


def cuda_mesh(backend: str) -> DeviceMesh:
    """All ranks, over the default group (gloo) or a new one; every rank uses the one GPU. From a group: for a mesh of its own
    making torch may want NCCL, which does not share a GPU."""
    torch.cuda.set_device(0)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    assert group is not None
    return DeviceMesh.from_group(group, "cuda")


def rows(step: int, rank: int, n: int = 2, width: int = WIDTH) -> torch.Tensor:
    return batch(step, rank, n, width).to(DEVICE)


class CudaTwin(Twin):
    """Both models live on the GPU; the comm is hostile as in the tests on the CPU."""

    def __init__(self, make: Callable[[], nn.Module], shard: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(lambda: make().to(DEVICE), shard, **options)


class Late:
    """A model of one rank behind a late comm, beside its twin. Small integers: every difference is an error."""

    def __init__(self, make: Callable[[], nn.Module], shard: Callable[[Any], Any], sleep_cycles: int = 4_000_000) -> None:
        from ragged_delayed_comm import DelayedComm

        torch.manual_seed(7)
        self.oracle = make().to(DEVICE)
        self.model: Any = copy.deepcopy(self.oracle)
        self.comm = DelayedComm(DEVICE, lambda: torch.cuda._sleep(sleep_cycles))
        with wrap_comms(lambda comm: self.comm):
            shard(self.model)
        for unit in units_in(self.model):
            unit.context.set_poison(True)

    def backward(self, loss_of: Any, x: torch.Tensor) -> None:
        for model in (self.model, self.oracle):
            loss_of(model, x).backward()

    def step(self, lr: float = 1 / 32) -> None:
        for model in (self.model, self.oracle):
            torch.optim.SGD(model.parameters(), lr).step()
            model.zero_grad()
            round_(model)

    def check(self) -> None:
        """On the current stream, and without a wait of the host before the first comparison is under way."""
        pairs = list(zip(self.model.named_parameters(), self.oracle.parameters(), strict=True))
        for (name, p), q in pairs:
            local = p.to_local().view_as(q)
            assert torch.equal(local, q), name
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert torch.equal(p.grad.to_local().view_as(q), q.grad), f"{name}.grad"
        assert self.comm.touched() == 0, "memory was written while a collective was under way"

    def train(self, loss_of: Any = models.weighted_loss, steps: int = 3) -> None:
        for step in range(steps):
            self.backward(loss_of, rows(step, 0))
            self.check()
            self.step()
            self.check()
