"""Small models of every shape that the engine must not care about. All weights are small integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parity import make_integer_
from raggedfsdp import fully_shard

WIDTH = 6


class Block(nn.Module):
    """Two weights and odd sizes, so that shards are uneven; a residual, so that gradients reach the first block."""

    def __init__(self, width: int = WIDTH, hidden: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).clamp(-4, 4)


class Stack(nn.Module):
    def __init__(self, depth: int = 3, width: int = WIDTH, hidden: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(()))
        make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).clamp(-4, 4)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Tied(nn.Module):
    """An embedding that is also the output projection."""

    def __init__(self, rows: int = 10, width: int = 8, tie: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.body = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, rows, bias=False)
        make_integer_(self)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Adapter(nn.Module):
    """LoRA: a frozen weight and two adapters in one unit; y = x W + x A B."""

    def __init__(self, width: int = 8, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False)
        self.a = nn.Linear(width, rank, bias=False)
        self.b = nn.Linear(rank, width, bias=False)
        make_integer_(self)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(x) + self.b(self.a(x))).clamp(-4, 4)


class Shapes(nn.Module):
    """Fewer rows than ranks, no elements at all, no dims at all."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = ((1, 17), (5, 3), (7,), (0, 4), ())) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])
        make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((w * w).sum() * x.sum() for w in self.weights), start=x.sum() * 0)


class Branches(nn.Module):
    """Three layers of one unit; who uses which is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        make_integer_(self)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        for name in names:
            x = self.layers[name](x)
        return x


def sum_loss(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x).sum()


def weighted_loss(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Unlike a plain sum, tells the outputs apart."""
    y = model(x)
    weights = torch.arange(y.numel(), device=y.device).remainder(3).sub(1).to(y.dtype)
    return (y * weights.view_as(y)).sum()


def shard_blocks(**options: Any) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)

    return shard


def shard_children(*names: str, root: bool = True, **options: Any) -> Callable[[nn.Module], None]:
    def shard(model: nn.Module) -> None:
        for name in names:
            fully_shard(model.get_submodule(name), **options)
        if root:
            fully_shard(model, **options)

    return shard


def shard_root(**options: Any) -> Callable[[nn.Module], None]:
    return shard_children(**options)
