"""What FSDP2's own tests ask of training: units of several modules that run in part, every way to checkpoint, frozen parts,
accumulation in some units only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_in_place
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import models_for_tests as models
from models_for_tests import WIDTH, Block, Stack, shard_blocks
from modes import buckets_of, clear_counts, exact_step
from parity import Twin, batch
from raggedfsdp import MixedPrecisionPolicy, UsageError, fully_shard
from ranks import run_ranks

# --- a loss in chunks: the model runs without its head, which then runs by itself for each chunk ---

ROWS = 8


class Chunked(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        models.make_integer_(self)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        h = self.norm(self.body(self.embed(tokens)).clamp(-4, 4)).clamp(-4, 4)
        return h if skip_head else self.head(h)


def shard_chunked(tie: bool, reshard: bool, checkpointed: bool = False) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        if checkpointed:
            checkpoint_in_place(model.body)
        group = [model.norm, model.head]
        for unit in (model.body, [model.embed, *group] if tie else group):
            fully_shard(unit, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)

    return shard


def tokens_of(step: int) -> Callable[[int], torch.Tensor]:
    return lambda rank: ((torch.arange(12) * 3 + step + rank) % ROWS).view(2, 6)


def in_chunks(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Each chunk has a backward of its own through the head; then the rest of the model has its."""
    h = model(tokens, skip_head=True)
    total, gradients = torch.zeros(()), []
    for chunk in torch.chunk(h.detach(), 3, dim=1):
        chunk = chunk.contiguous().requires_grad_()
        loss = models.weighted_loss(model.head, chunk)
        loss.backward()
        total += loss.detach()
        gradients.append(chunk.grad)
    h.backward(torch.cat(gradients, dim=1))
    return total


class HandBackward(Twin):
    """Its losses run backward themselves."""

    def backward(self, loss_of: Any, batch_of: Callable[[int], Any]) -> torch.Tensor:
        for rank in range(self.world):
            loss = loss_of(self.oracle, batch_of(rank))
            if rank == self.rank:
                want = loss.detach()
        self.same("loss", loss_of(self.model, batch_of(self.rank)).detach(), want)
        return want


def _in_chunks() -> None:
    for tie, reshard, checkpointed in itertools.product((False, True), (True, False), (False, True)):
        twin = HandBackward(lambda tie=tie: Chunked(tie), shard_chunked(tie, reshard, checkpointed))
        for step in range(2):
            twin.backward(in_chunks, tokens_of(step))
            twin.check()
            exact_step(twin)
        for micro in range(3):  # accumulated: what counts is the last backward of the last micro-batch
            twin.model.set_requires_gradient_sync(micro == 2)
            twin.model.set_is_last_backward(micro == 2)
            twin.backward(in_chunks, tokens_of(micro))
        twin.check()


def _kept_between_chunks() -> None:
    """The head's settings are switched for the loop over chunks: it is gathered once there."""
    for tie, reshard in itertools.product((False, True), (True, False)):
        twin = HandBackward(lambda tie=tie: Chunked(tie), shard_chunked(tie, reshard))
        (head,) = twin.model.head._ragged_unit.core.buckets

        def loss(model: Any, tokens: torch.Tensor, twin: Any = twin, head: Any = head, reshard: bool = reshard) -> torch.Tensor:
            if model is not twin.model:
                return in_chunks(model, tokens)
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            gathers = head.gathers
            total = in_chunks(model, tokens)
            assert head.gathers == gathers + 1
            assert head.gathered
            model.head.set_reshard_after_forward(reshard)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            assert not head.gathered
            return total

        for step in range(2):
            twin.backward(loss, tokens_of(step))
            twin.check()
            exact_step(twin)


def _partly_twice() -> None:
    """Two forwards without the head before one backward; an exception in the middle of one."""
    twin = Twin(lambda: Chunked(False), shard_chunked(False, True))
    loss = lambda m, t: m(t, skip_head=True).sum() + m(t.flip(0), skip_head=True).sum()  # noqa: E731
    twin.backward(loss, tokens_of(0))
    twin.check()
    assert twin.model.head.weight.grad is None

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = twin.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        twin.model(tokens_of(0)(0))
    handle.remove()
    twin.model.reset_iter_state()
    twin.check_rest()
    for model in (twin.model, twin.oracle):
        model.zero_grad()
    twin.backward(lambda m, t: m(t).sum(), tokens_of(1))
    twin.check()


@pytest.mark.parametrize("world", [1, 3])
def test_units_that_run_in_part(world: int) -> None:
    for body in (_in_chunks, _kept_between_chunks, _partly_twice):
        run_ranks(body, world, 60)


# --- checkpointing, as each of torch's interfaces does it ---


class Language(nn.Module):
    """Embeddings, three blocks, a norm and an output that may share the embedding's weight."""

    def __init__(self, tie: bool, by_call: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(ROWS, WIDTH), nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, ROWS, bias=False)
        self.by_call = by_call
        models.make_integer_(self)
        if tie:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.by_call else block(h)
        return self.output(self.norm(h).clamp(-4, 4))


def _group_for_memory(model: Any, options: Any) -> None:
    fully_shard(model.blocks[0], **options)
    fully_shard([model.blocks[1], model.blocks[2]], **options)
    fully_shard(model.tokens, **options)
    model.tokens.set_unshard_in_backward(False)  # an embedding's backward does not read its weight
    fully_shard([model.norm, model.output], **options)


def _group_tied(model: Any, options: Any) -> None:
    fully_shard([model.tokens, model.output], **options)
    for block in model.blocks:
        fully_shard(block, **options)


def _group_blocks(model: Any, options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)


GROUPINGS: dict[str, tuple[bool, Callable[[Any, Any], None]]] = {
    "blocks": (True, _group_blocks),
    "for memory": (False, _group_for_memory),
    "tied": (True, _group_tied),
}


class Renamed(Twin):
    def pairs(self) -> Any:
        """The wrapper of checkpointed modules is in their names."""
        whole = dict(self.oracle.named_parameters())
        for name, p in self.model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            yield name, p, whole[name]


def _checkpointed(how: str) -> None:
    for (tie, group), reshard in itertools.product(GROUPINGS.values(), (True, False)):

        def shard(model: Any, group: Any = group, reshard: bool = reshard) -> None:
            if how == "wrapper":
                apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
            elif how == "in place":
                for block in model.blocks:
                    checkpoint_in_place(block)
            options = {"reshard_after_forward": reshard}
            group(model, options)
            fully_shard(model, **options)

        twin = Renamed(lambda tie=tie: Language(tie, how == "call"), shard)
        for forwards in (1, 2):  # two forwards before one backward: preference training
            for step in range(2):
                loss = lambda m, t, n=forwards: sum(models.weighted_loss(m, t + i).clamp(-64, 64) for i in range(n))  # noqa: E731
                twin.backward(loss, lambda rank, step=step: tokens_of(step)(rank).clamp(0, ROWS - 2))
                twin.check()
                exact_step(twin)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["call", "wrapper", "in place"])
def test_every_way_to_checkpoint(how: str, world: int) -> None:
    run_ranks(_checkpointed, world, 60, how)


# --- frozen parts ---


def _freeze(model: nn.Module, keep: Callable[[str], bool]) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(keep(name))


def _biases_only() -> None:
    """Only biases train, frozen before or after wrapping, with and without checkpoints."""
    only = lambda name: "bias" in name  # noqa: E731
    for before, checkpointed, reshard in itertools.product((True, False), (True, False), (True, False)):

        def make(before: bool = before) -> nn.Module:
            model = Stack()
            if before:
                _freeze(model, only)
            return model

        def shard(model: Any, checkpointed: bool = checkpointed, reshard: bool = reshard) -> None:
            if checkpointed:
                for block in model.blocks:
                    checkpoint_in_place(block)
            shard_blocks(reshard_after_forward=reshard)(model)

        twin = Twin(make, shard)
        for model in (twin.model, twin.oracle):
            _freeze(model, only)
        twin.train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))


class Repeats(nn.Module):
    """The same layers again and again, a frozen one among them, and in between without a graph, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        models.make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).clamp(-2, 2)
        for _ in range(3):
            x = self.frozen(torch.relu(self.trained(x))).clamp(-2, 2)
            with torch.no_grad():
                x += torch.relu(self.trained(x)).clamp(-2, 2)
        return x


def _frozen_units() -> None:
    for reshard in (True, False):

        def shard(model: Any, reshard: bool = reshard) -> None:
            for layer in (model.first, model.frozen, model.trained):
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)

        Twin(Repeats, shard).train(models.weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH))
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
        for step, keep in enumerate(("1", "", "012", "0", "2")):  # blocks that train; none: an evaluation
            for model in (twin.model, twin.oracle):
                _freeze(model, lambda name, keep=keep: name.startswith("blocks") and name[7] in keep)
            if keep:
                twin.train(models.weighted_loss, lambda s, rank, step=step: batch(step, rank, 2, WIDTH), steps=1)
            else:
                twin.same("frozen", twin.model(batch(1, 0, 2, WIDTH)), twin.oracle(batch(1, 0, 2, WIDTH)))
            twin.check()


@pytest.mark.parametrize("world", [1, 3])
def test_frozen_parts(world: int) -> None:
    run_ranks(_biases_only, world, 60)
    run_ranks(_frozen_units, world, 60)


# --- accumulation in some units only ---


def _some_accumulate() -> None:
    micros = 3
    for mode, reshard in itertools.product(("all", "root only", "some blocks"), (True, False)):
        twin = Twin(Stack, shard_blocks(reshard_after_forward=reshard))
        waiting = {"all": [twin.model], "root only": [twin.model], "some blocks": list(twin.model.blocks[:2])}[mode]
        late = {"all": twin.units, "root only": twin.units[:1], "some blocks": [b._ragged_unit for b in waiting]}[mode]
        for step in range(2):
            clear_counts(twin)
            for micro in range(micros):
                for m in waiting:
                    m.set_requires_gradient_sync(micro == micros - 1, recurse=mode != "root only")
                twin.backward(models.weighted_loss, lambda rank, n=micros * step + micro: batch(n, rank, 2, WIDTH))
            twin.check()
            for unit in twin.units:
                want = 1 if unit in late else micros
                assert {b.reductions for b in unit.core.buckets} == {want}, (mode, unit.name)
            gathers = {b.gathers for b in buckets_of(twin)}
            assert gathers == {micros * (2 if reshard else 1)}, (mode, reshard)
            exact_step(twin)


def _casts_in_groups() -> None:
    """Inputs are cast for every module of a unit, not for the first only."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).float())

    model = Pair()
    policy = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard([model.a, model.b], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    out = model(torch.ones(2, WIDTH))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(UsageError, match="empty list"):
        fully_shard([])


@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_in_some_units(world: int) -> None:
    run_ranks(_some_accumulate, world, 60)
    run_ranks(_casts_in_groups, world, 60)
