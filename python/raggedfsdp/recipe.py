"""What to train and how: the parts that the sharded run and the unsharded one beside it must have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raggedfsdp import UsageError
from raggedfsdp.data import VOCABULARY
from raggedfsdp.models import build_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TrainOptions:
    model: str
    data: Path | None
    steps: int
    batch: int  # sequences of one rank in one micro-batch
    sequence: int
    learning_rate: float
    precision: str  # "fp32" or "bf16"
    accumulate: int  # micro-batches in one step
    reshard_after_forward: bool
    clip_norm: float  # 0 leaves gradients as they are
    seed: int
    verify: bool
    rows: int | None = None  # block of a matrix that no shard boundary cuts
    max_buckets: int | None = None  # collectives per unit; None: what the planner finds cheapest


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where it computes. The default process group has these ranks."""

    rank: int
    ranks: int
    device: torch.device


def check_config(config: PretrainedConfig, options: TrainOptions) -> None:
    """What the model must allow for, before anything is built."""
    vocabulary = getattr(config, "vocab_size", VOCABULARY)
    if vocabulary < VOCABULARY:
        raise UsageError(f"--model: vocab_size is {vocabulary}; text is read as bytes, so it must be {VOCABULARY} or more")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.sequence > longest:
        raise UsageError(f"--sequence: {options.model} takes {longest} tokens at most, not {options.sequence}")


def build_seeded(config: PretrainedConfig, options: TrainOptions, device: torch.device) -> nn.Module:
    """The same initial values on every rank and in the unsharded run. Dropout cannot be repeated, so `verify` is without."""
    torch.manual_seed(options.seed)
    return build_model(config, device).train(not options.verify)


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def clip(model: nn.Module, options: TrainOptions) -> float:
    """The norm of the whole gradient, which is then scaled to at most `clip_norm`."""
    limit = options.clip_norm if options.clip_norm > 0 else math.inf
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
