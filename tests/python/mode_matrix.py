"""Every way to run a model at once: resharding, accumulation, precision, frozen parts, checkpointing, wrapping."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import models_for_tests as models
from models_for_tests import WIDTH, Block
from parity import Twin
from raggedfsdp import MixedPrecisionPolicy, fully_shard
from raggedfsdp._tree import map_tensors

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Mode:
    reshard: bool | None = True
    accumulation: str = "none"  # every: each micro-batch is reduced; last: only the last one
    bf16: bool = False  # compute in bf16, reduction in fp32
    frozen: bool = False
    checkpoints: str = "none"
    wrapping: str = "blocks"


CHOICES: dict[str, tuple[Any, ...]] = {
    "reshard": (True, False, None),
    "accumulation": ("none", "every", "last"),
    "bf16": (False, True),
    "frozen": (False, True),
    "checkpoints": ("none", "reentrant", "non-reentrant"),
    "wrapping": ("blocks", "nested", "grouped", "root"),
}


def all_modes() -> list[Mode]:
    assert list(CHOICES) == [f.name for f in fields(Mode)]
    return [Mode(*values) for values in itertools.product(*CHOICES.values())]


def covering_modes() -> list[Mode]:
    """Few modes in which every two choices of different kinds meet."""

    def pairs(mode: Mode) -> set[Any]:
        values = [(name, getattr(mode, name)) for name in CHOICES]
        return set(itertools.combinations(values, 2))

    modes = all_modes()
    wanted = set().union(*(pairs(m) for m in modes))
    chosen = []
    while wanted:
        best = max(modes, key=lambda m: len(pairs(m) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


class Modal(nn.Module):
    """Blocks that may be checkpointed, then branches of which the caller says which run."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        self.mode = mode
        models.make_integer_(self)
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-1, 1)
        if mode.frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].down.requires_grad_(False)
            self.first.bias.requires_grad_(False)

    def run(self, blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        x = self.first(x).clamp(-4, 4)
        for segment in ([0], [1, 2]):
            blocks = [self.blocks[i] for i in segment]
            if self.mode.checkpoints == "none":
                x = self.run(blocks, x)
            else:
                x = checkpoint(self.run, blocks, x, use_reentrant=self.mode.checkpoints == "reentrant")
        for name in use:
            x = self.branches[name](x).clamp(-4, 4)
        return x


def options(mode: Mode) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(BF16, FP32) if mode.bf16 else MixedPrecisionPolicy()
    return {"reshard_after_forward": mode.reshard, "mp_policy": policy}


def wrap(mode: Mode) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        units: list[Any] = []
        if mode.wrapping == "blocks":
            units = list(model.blocks)
        elif mode.wrapping == "nested":
            units = [part for block in model.blocks for part in (block.up, block)]
        elif mode.wrapping == "grouped":
            units = [[model.first, model.blocks[0]], list(model.blocks[1:]), list(model.branches.values())]
        for unit in units:
            fully_shard(unit, **options(mode))
        fully_shard(model, **options(mode))

    return shard


class ModalTwin(Twin):
    """Its oracle computes in the mode's dtype, on a copy, and adds each gradient in fp32."""

    def __init__(self, mode: Mode, make: Callable[[Mode], nn.Module] = Modal, shard: Any = None) -> None:
        super().__init__(lambda: make(mode), shard if shard is not None else wrap(mode))
        self.mode = mode

    def compute_copy(self) -> nn.Module:
        made: Any = copy.deepcopy(self.oracle)
        if self.mode.bf16:
            made.to(BF16)
            made.register_forward_pre_hook(self._cast, with_kwargs=True)
        for p, q in zip(self.oracle.parameters(), made.parameters(), strict=True):
            q.grad = None
            if q.requires_grad:
                q.register_post_accumulate_grad_hook(self._adder(p))
        return made

    @staticmethod
    def _cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(lambda t: t.to(BF16) if t.is_floating_point() else t, (args, kwargs))

    @staticmethod
    def _adder(master: nn.Parameter) -> Callable[[nn.Parameter], None]:
        def add(q: nn.Parameter) -> None:
            assert q.grad is not None
            gradient = q.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad + gradient
            q.grad = None

        return add

    def backward(self, loss_of: Any, batch_of: Callable[[int], Any]) -> torch.Tensor:
        """loss_of(model, batch, rank) runs the backward itself and returns the loss."""
        for rank in range(self.world):
            loss = loss_of(self.compute_copy(), batch_of(rank), rank)
            if rank == self.rank:
                want = loss.detach()
        self.same("loss", loss_of(self.model, batch_of(self.rank), self.rank).detach(), want)
        return want

    def micro_batches(self, loss_of: Any, batch_of: Callable[[int, int], Any]) -> None:
        """As the mode accumulates."""
        n = 1 if self.mode.accumulation == "none" else 3
        for micro in range(n):
            self.model.set_requires_gradient_sync(self.mode.accumulation != "last" or micro == n - 1)
            self.backward(loss_of, lambda rank, micro=micro: batch_of(micro, rank))
        self.check()

    def step(self) -> None:
        for model in (self.model, self.oracle):
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1 / 32).step()
            model.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.round_().clamp_(-1, 1)
        self.check()
