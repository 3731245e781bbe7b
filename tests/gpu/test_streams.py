"""Compute waits for collectives by stream order: behind a comm that is late on a stream of its own, and whose memory is NaN
until it is done, the numbers are the oracle's, and nobody writes to memory that a collective is using."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import DEVICE, Late, cuda_mesh, rows

import models_for_tests as models
from models_for_tests import Adapter, Stack, shard_blocks, shard_children, shard_root
from parity import round_
from raggedfsdp import _C
from ranks import run_ranks
from test_engine_checkpointing import Segments

try:
    import ragged_delayed_comm as delayed  # after torch, whose libraries it needs
except ImportError as error:
    pytest.skip(f"tests/gpu/run builds the late comm: {error}", allow_module_level=True)


def _control() -> None:
    """Without a wait the comm shows NaN, and a write in flight is seen: otherwise the tests here prove nothing."""
    torch.cuda.set_device(0)
    comm = delayed.DelayedComm(DEVICE, lambda: torch.cuda._sleep(100_000_000))
    values = torch.arange(1000.0, device=DEVICE)
    torch.cuda.synchronize()
    work = comm.all_gather(values)
    early = values.clone()  # races with the poison, which comes at once, and not with the result, which comes late
    for _ in range(20):
        early = torch.where(early.isnan(), early, values)
    work.order_after()
    late = values.clone()
    torch.cuda.synchronize()
    assert early.isnan().all(), "the comm was not late"
    assert torch.equal(late, torch.arange(1000.0, device=DEVICE))
    assert comm.touched() == 0
    work = comm.all_reduce(values, _C.ReduceOp.SUM)
    for _ in range(20):
        values.fill_(1.0)
    work.order_after()
    torch.cuda.synchronize()
    assert comm.touched() == 1, "a write in flight was not seen"


def _trains() -> None:
    mesh = cuda_mesh("gloo")
    for reshard in (True, False, None):
        options = {"mesh": mesh, "reshard_after_forward": reshard}
        Late(Stack, shard_blocks(**options)).train()
        late = Late(Adapter, shard_root(**options))
        for step in range(2):
            late.backward(models.weighted_loss, rows(step, 0, 3, 8))
            late.check()


def _modes() -> None:
    mesh = cuda_mesh("gloo")
    for kind in ("reentrant", "non-reentrant"):
        late = Late(lambda kind=kind: Segments(kind, "01 23"), shard_children("blocks.0", "blocks.1", "blocks.2", mesh=mesh))
        late.train(lambda m, x: models.weighted_loss(m, x.detach().requires_grad_()), steps=2)
    late = Late(Stack, shard_blocks(mesh=mesh))
    for step in range(4):
        late.model.set_requires_gradient_sync(step % 2 == 1)
        late.backward(models.weighted_loss, rows(step, 0))
        if step % 2 == 1:
            late.check()
    late.step()
    loss = lambda m, x: models.weighted_loss(m, x) + models.weighted_loss(m, x + 1)  # noqa: E731
    late.train(loss, steps=2)
    for unit in (late.model, *late.model.blocks):
        unit.unshard(async_op=True)
    assert torch.equal(late.model(rows(3, 0)), late.oracle(rows(3, 0)))
    for unit in (late.model, *late.model.blocks):
        unit.reshard()
    late.train(steps=2)


def _other_stream() -> None:
    """Sharded on the default stream, trained on another: gradients are collected there too."""
    mesh = cuda_mesh("gloo")
    late = Late(Stack, shard_blocks(mesh=mesh))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late.train()
        # The default stream is busy: what runs there by mistake comes too late.
        for step in range(3):
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda._sleep(50_000_000)
            late.backward(models.weighted_loss, rows(10 + step, 0))
            late.check()
            late.step()
    torch.cuda.current_stream().wait_stream(side)
    late.check()


def _event() -> None:
    """The forward after an optimiser step on another stream waits for the event it was given."""
    mesh = cuda_mesh("gloo")
    late = Late(Stack, shard_blocks(mesh=mesh))
    side = torch.cuda.Stream()
    for step in range(3):
        late.backward(models.weighted_loss, rows(step, 0))
        late.check()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            torch.optim.SGD(late.model.parameters(), 1 / 32).step()
            round_(late.model)
            event = side.record_event()
        late.model.set_post_optim_event(event)
        torch.optim.SGD(late.oracle.parameters(), 1 / 32).step()
        round_(late.oracle)
        assert torch.equal(late.model(rows(step, 0)), late.oracle(rows(step, 0)))
        for model in (late.model, late.oracle):
            model.zero_grad()


@pytest.mark.parametrize("body", [_control, _trains, _modes, _other_stream, _event], ids=lambda body: body.__name__[1:])
def test_stream_order(body: Any) -> None:
    run_ranks(body, 1, 110)
