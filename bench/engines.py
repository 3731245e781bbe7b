"""The engines that the benchmarks compare, each asked to train the same model in the same way.

Every block of the transformer is a unit of its own, the optimiser is torch's AdamW, the backend is gloo. "bf16" is bf16 compute
with fp32 masters and fp32 reduction, in each engine's own words (docs/benchmarks.md says where these differ).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from transformer import Block, Shape, Transformer


@dataclass(frozen=True)
class Job:
    """What every engine trains. `batch` sequences per rank."""

    ranks: int = 2
    precision: str = "fp32"
    width: int = 512
    layers: int = 12
    batch: int = 2
    sequence: int = 128

    def build(self) -> Transformer:
        torch.manual_seed(0)
        return self.shape.build()

    @property
    def shape(self) -> Shape:
        return Shape(width=self.width, layers=self.layers)

    def tokens(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randint(0, self.shape.vocabulary, (self.batch, self.sequence + 1), generator=generator)


@dataclass
class Trainer:
    """The three phases of a step of one engine."""

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.forward(tokens[:, :-1], tokens[:, 1:])
        self.backward(loss)
        self.update()
        return loss.detach()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    # A large eps, so that the losses show a gradient that is scaled wrongly: Adam's step would hide it.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def _trainer(model: nn.Module) -> Trainer:
    optimizer = _adamw(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, torch.Tensor.backward, update)


def _shard_units(shard: Callable[..., Any], job: Job) -> Trainer:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy()
    if job.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = job.build()
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    return _trainer(model)


def unsharded(job: Job) -> Trainer:
    return _trainer(job.build())


def raggedfsdp(job: Job) -> Trainer:
    from raggedfsdp import fully_shard

    return _shard_units(fully_shard, job)


def raggedfsdp_debug(job: Job) -> Trainer:
    from raggedfsdp import _C
    from raggedfsdp.comm import wrap_comms

    with wrap_comms(_C.make_checked_comm):  # what RAGGEDFSDP_DEBUG=1 does
        return raggedfsdp(job)


def fsdp2(job: Job) -> Trainer:
    from torch.distributed.fsdp import fully_shard

    return _shard_units(fully_shard, job)


def fsdp1(job: Job) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(torch.bfloat16, torch.float32) if job.precision == "bf16" else None
    return _trainer(
        FullyShardedDataParallel(
            job.build(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=precision,
            device_id=torch.device("cpu"),
        )
    )


def ddp(job: Job) -> Trainer:
    # The views save DDP a copy of all gradients, in memory and in time.
    trainer = _trainer(nn.parallel.DistributedDataParallel(job.build(), gradient_as_bucket_view=True))
    model = trainer.forward
    if job.precision == "bf16":

        def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(tokens, targets)

        trainer.forward = forward
    return trainer


def deepspeed(job: Job) -> Trainer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled on the spot, and training does not use it
    ds.init_distributed(dist_backend="gloo", verbose=False)
    plain_linear = F.linear
    with quiet():
        engine, *_ = ds.initialize(
            model=(model := job.build()),
            optimizer=_adamw(model),
            config=deepspeed_config(job, model),
            dist_init_required=False,
        )
    own_linear, F.linear = F.linear, plain_linear  # DeepSpeed's replacement is global and would serve the others too

    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        F.linear = own_linear
        try:
            return engine(tokens, targets)
        finally:
            F.linear = plain_linear

    return Trainer(forward, engine.backward, engine.step)


def deepspeed_config(job: Job, model: Transformer) -> dict[str, Any]:
    """Buckets as large as a block. The rest is its default: made to release each block after its forward, as the others do, it
    was slower and no smaller."""
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": job.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,  # by default it clips to norm 1
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 10 * job.width,  # biases and norms stay whole
        },
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


@contextlib.contextmanager
def quiet() -> Any:
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


ENGINES: dict[str, Callable[[Job], Trainer]] = {
    "raggedfsdp": raggedfsdp,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "ddp": ddp,
    "deepspeed": deepspeed,
    "raggedfsdp-debug": raggedfsdp_debug,
}
TITLES = {
    "raggedfsdp": "RaggedFSDP",
    "fsdp2": "FSDP2",
    "fsdp1": "FSDP1",
    "ddp": "DDP",
    "deepspeed": "DeepSpeed ZeRO-3",
    "raggedfsdp-debug": "ours, debug mode",
}
ONLY_IF_ASKED = {"raggedfsdp-debug"}


def missing(engine: str) -> str:
    """What to do where an engine is not installed, else nothing."""
    if engine != "deepspeed" or importlib.util.find_spec("deepspeed") is not None:
        return ""
    return "not installed: pip install -r requirements-bench.txt"
