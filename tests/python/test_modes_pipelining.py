"""torch.distributed.pipelining over sharded stages: each rank has the gradients of the unsharded whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from models_for_tests import Stack
from modes import micro_batch
from raggedfsdp import fully_shard
from ranks import run_ranks

MICRO_BATCHES = 4


def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out * target).sum()


def shard(stage: Any, mesh: DeviceMesh, reshard: bool) -> None:
    for unit in (*stage.blocks, stage):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    for unit in (*stage.blocks, stage):
        unit.set_gradient_divide_factor(1.0)


def batch_of(step: int, data_rank: int) -> torch.Tensor:
    return torch.cat([micro_batch(step, data_rank, micro) for micro in range(MICRO_BATCHES)])


def target_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel()).remainder(3).sub(1).to(x.dtype).view_as(x)


class Pipeline:
    """This rank's stages, beside the whole model, which trains on all ranks' batches."""

    def __init__(self, make_schedule: Callable[..., Any], stages_per_rank: int, reshard: bool) -> None:
        ranks = 2
        self.mesh = init_device_mesh("cpu", (ranks, dist.get_world_size() // ranks), mesh_dim_names=("pp", "dp"))
        pp, dp = self.mesh["pp"], self.mesh["dp"]
        torch.manual_seed(7)
        self.whole = nn.ModuleList(Stack(2) for _ in range(ranks * stages_per_rank))
        self.numbers = list(range(pp.get_local_rank(), len(self.whole), ranks))
        self.parts: list[Any] = [copy.deepcopy(self.whole[i]) for i in self.numbers]
        stages = []
        for number, part in zip(self.numbers, self.parts, strict=True):
            shard(part, dp, reshard)
            stages.append(PipelineStage(part, number, len(self.whole), torch.device("cpu"), group=pp.get_group()))
        given = stages[0] if stages_per_rank == 1 else stages
        self.schedule = make_schedule(given, MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
        self.data_rank, self.data_ranks = dp.get_local_rank(), dp.size()

    def step(self, step: int) -> None:
        x = batch_of(step, self.data_rank)
        inputs = (x,) if self.numbers[0] == 0 else ()
        target = target_of(x) if self.numbers[-1] == len(self.whole) - 1 else None
        self.schedule.step(*inputs, target=target)
        for rank in range(self.data_ranks):
            out = batch_of(step, rank)
            for module in self.whole:
                out = module(out)
            loss_fn(out, target_of(out)).backward()
        self.check()

    def check(self) -> None:
        for number, part in zip(self.numbers, self.parts, strict=True):
            for (name, p), q in zip(part.named_parameters(), self.whole[number].parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q), f"stage {number} {name}"
                assert (p.grad is None) == (q.grad is None), f"stage {number} {name}"
                if q.grad is not None:
                    assert torch.equal(p.grad.full_tensor(), q.grad), f"stage {number} {name}.grad"

    def optimise(self) -> None:
        for module in (*self.parts, self.whole):
            torch.optim.SGD(module.parameters(), 1 / 32).step()
            module.zero_grad()
            with torch.no_grad():
                for p in module.parameters():
                    p.round_().clamp_(-2, 2)
        self.check()


SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
}


def _trains(name: str, reshard: bool) -> None:
    pipeline = Pipeline(*SCHEDULES[name], reshard)
    for step in range(2):
        pipeline.step(step)
        pipeline.optimise()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch(name: str) -> None:
    for reshard in (True, False):
        run_ranks(_trains, 4, 60, name, reshard)
