"""When the memory of `.grad` is held, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models_for_tests import WIDTH, Stack, shard_blocks, weighted_loss
from modes import buckets_of
from parity import Twin, batch
from ranks import run_ranks


def gradient_bytes(twin: Twin) -> int:
    return sum(b.gradient_shard_bytes for b in buckets_of(twin))


def shard_bytes(twin: Twin) -> int:
    return sum(b.shard_bytes for b in buckets_of(twin))


def twin_after_a_step(set_to_none: bool = True) -> Twin:
    twin = Twin(lambda: Stack(3), shard_blocks())
    backward(twin, 0)
    for model in (twin.model, twin.oracle):
        torch.optim.SGD(model.parameters(), 0.5).zero_grad(set_to_none)
    return twin


def backward(twin: Twin, step: int) -> None:
    twin.backward(weighted_loss, lambda rank: batch(step, rank, 2, WIDTH))
    twin.check()


def forward(twin: Twin) -> torch.Tensor:
    return weighted_loss(twin.model, batch(5, twin.rank, 2, WIDTH))


def _between_zero_grad_and_the_reduction() -> None:
    twin = twin_after_a_step()
    assert gradient_bytes(twin) == shard_bytes(twin)
    loss = forward(twin)
    assert gradient_bytes(twin) == 0
    loss.backward()
    assert gradient_bytes(twin) == shard_bytes(twin)
    twin.model.zero_grad()
    backward(twin, 1)
    assert twin.context.pool_reserved_bytes == 0
    assert twin.context.pool_peak_reserved_bytes > 0


def _in_a_reentrant_checkpoint() -> None:
    """Its units run without gradients at first."""
    twin = twin_after_a_step()
    blocks = twin.model.blocks
    run = [block.forward for block in blocks]
    held = []

    def middle(x: torch.Tensor) -> torch.Tensor:
        held.append(gradient_bytes(twin))
        return run[1](x)

    blocks[1].forward = middle
    x = batch(5, twin.rank, 2, WIDTH).requires_grad_()
    twin.model.forward = lambda x: checkpoint(blocks[2], checkpoint(blocks[1], x, use_reentrant=True), use_reentrant=True)
    twin.model(x).sum().backward()
    assert held[0] == 0


def _zeros_stay() -> None:
    twin = twin_after_a_step(set_to_none=False)
    before = [p.grad._local_tensor.data_ptr() for p in twin.model.parameters()]
    backward(twin, 1)
    assert [p.grad._local_tensor.data_ptr() for p in twin.model.parameters()] == before


def _one_gradient_keeps_its_bucket() -> None:
    twin = Twin(lambda: Stack(3), shard_blocks())
    backward(twin, 0)
    for model in (twin.model, twin.oracle):
        for name, p in model.named_parameters():
            if name != "blocks.1.up.weight":
                p.grad = None
    backward(twin, 1)  # adds to the one that is left
    twin.model.zero_grad()
    twin.model.blocks[1].up.weight.grad = twin.model.blocks[1].up.weight.detach().clone()
    forward(twin)
    held = {unit.name for unit in twin.units if unit.core.buckets[0].gradient_shard_bytes}
    assert held == {"blocks.1"}, held


def _what_is_kept_is_gone() -> None:
    twin = Twin(lambda: Stack(3), shard_blocks())
    backward(twin, 0)
    parameter = next(p for p in twin.model.parameters() if p.to_local().numel() > 0)
    kept, copy = parameter.grad, parameter.grad.clone()
    twin.model.zero_grad()
    with torch.no_grad():
        forward(twin)
    assert torch.equal(kept.to_local(), copy.to_local()), "a forward without gradients needs no memory for them"
    forward(twin)
    with pytest.raises(RuntimeError, match=r"gradient shard\) was released.*clone what you want to keep"):
        kept.to_local().sum()


def _put_aside_for_an_evaluation() -> None:
    """`.grad` taken off around an evaluation and put back."""
    twin = Twin(lambda: Stack(3), shard_blocks())
    backward(twin, 0)
    aside = {p: p.grad for p in twin.model.parameters()}
    for p in aside:
        p.grad = None
    with torch.no_grad():
        forward(twin)
    for p, gradient in aside.items():
        p.grad = gradient
    twin.check()


def _optimiser_in_backward() -> None:
    """Gradients that hooks use up are held for the buckets in flight only."""
    twin = Twin(lambda: Stack(3), shard_blocks())
    most = []
    for p in twin.model.parameters():

        def use_up(p: Any) -> None:
            most.append(gradient_bytes(twin))
            p.grad = None

        p.register_post_accumulate_grad_hook(use_up)
    forward(twin).backward()
    assert gradient_bytes(twin) == 0
    # The one published, and the next, whose reduction has started.
    largest = sorted((b.shard_bytes for b in buckets_of(twin)), reverse=True)
    assert max(most) <= sum(largest[:2]) < shard_bytes(twin)


@pytest.mark.parametrize(
    "body",
    [
        _between_zero_grad_and_the_reduction,
        _in_a_reentrant_checkpoint,
        _zeros_stay,
        _one_gradient_keeps_its_bucket,
        _what_is_kept_is_gone,
        _put_aside_for_an_evaluation,
        _optimiser_in_backward,
    ],
)
def test_memory_of_gradients(body: Callable[[], None]) -> None:
    for world in (1, 2):
        run_ranks(body, world, 60)
