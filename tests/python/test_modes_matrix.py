"""The scenarios that break sharded trainers, each in every mode. Quick: modes in which every two choices meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mode_matrix import CHOICES, Modal, ModalTwin, Mode, all_modes, covering_modes, options, wrap
from models_for_tests import WIDTH, Block, shard_children, weighted_loss
from parity import Twin, batch, make_integer_
from raggedfsdp import UsageError, full_state_dict, fully_shard
from ranks import run_ranks
from test_engine_life import Output


def weigh(y: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(y.numel()).remainder(3).sub(1).to(y.dtype)
    return (y * weights.view_as(y)).sum()


def inputs(step: int) -> Callable[[int, int], torch.Tensor]:
    return lambda micro, rank: batch(100 * step + micro, rank, 2, WIDTH).requires_grad_()


# --- several forwards (L1, L2 where the mode checkpoints) ---


def _summed(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    loss = weigh(model(x)) + weigh(model(x.detach() + 1))
    loss.backward()
    return loss


def _in_order(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    first, second = weigh(model(x)), weigh(model(x.detach() - 1))
    first.backward()
    second.backward()
    return first.detach() + second


def _in_reverse(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    first, second = weigh(model(x)), weigh(model(x.detach() - 1))
    second.backward()
    first.backward()
    return first.detach() + second


def _called_twice(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    loss = weigh(model(x, "aba"))
    loss.backward()
    return loss


# --- outputs edited (L3), wrapped (L4), parts used by some ranks (L5) ---


def _edited(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float32)
    for view, in_place in itertools.product((True, False), (True, False)):
        out = model(x[None])
        out = out.squeeze(0) if view else out.clone().squeeze(0)
        other = x.to(out.dtype)
        if in_place:
            out += other
        else:
            out = out + other
        total = total + weigh(out).float()
    total.backward()
    return total


def _used_here_and_there(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    loss = weigh(model(x, "ab"[rank % 2]))
    loss.backward()
    return loss


SCENARIOS: dict[str, Callable[..., torch.Tensor]] = {
    "two losses added": _summed,
    "two losses in order": _in_order,
    "two losses in reverse": _in_reverse,
    "called twice": _called_twice,
    "edited outputs": _edited,
    "branches by rank": _used_here_and_there,
}


def _scenarios(modes: list[Mode]) -> None:
    for mode, (name, loss) in itertools.product(modes, SCENARIOS.items()):
        twin = ModalTwin(mode)
        try:
            for step in range(2):
                twin.micro_batches(loss, inputs(step))
                if name == "branches by rank":
                    assert twin.model.branches["c"].weight.grad is None
                twin.step()
        except Exception as error:
            raise AssertionError(f"{name} in {mode}: {error}") from error


@pytest.mark.parametrize("part", range(3))
def test_scenarios(part: int) -> None:
    run_ranks(_scenarios, 2, 110, covering_modes()[part::3])


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", range(6))
def test_scenarios_in_every_mode(part: int) -> None:
    run_ranks(_scenarios, 2, 600, all_modes()[part::6])


# --- containers (L4) ---


class Packed(nn.Module):
    """The modes' model behind a dataclass, with keyword arguments only."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.inner = Modal(mode)

    def forward(self, *, x: Output) -> Output:
        return Output(self.inner(x.logits), {"more": [self.inner(x.logits - 1, "b"), None]}, x.note)


def shard_packed(mode: Mode) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        wrap(mode)(model.inner)
        fully_shard(model, **options(mode))

    return shard


def _packed(modes: list[Mode]) -> None:
    for mode, field in itertools.product(modes, ("logits", "more", "both")):

        def loss(model: nn.Module, x: torch.Tensor, rank: int, field: str = field) -> torch.Tensor:
            out = model(x=Output(x, note="kept"))
            assert type(out) is Output
            assert out.note == "kept"
            more = out.extra["more"][0]
            parts = {"logits": [out.logits], "more": [more], "both": [out.logits, more]}[field]
            total = sum((weigh(y) for y in parts), start=torch.zeros((), dtype=more.dtype))
            total.backward()
            return total

        twin = ModalTwin(mode, Packed, shard_packed(mode))
        twin.micro_batches(loss, inputs(1))


# --- optimisers made at other times, assigned values (L8) ---


def _optimisers(modes: list[Mode]) -> None:
    for mode in modes:
        model: Any = Modal(mode)
        early = torch.optim.SGD(model.parameters(), 0.1)
        wrap(mode)(model)
        x = batch(0, 0, 2, WIDTH)
        weigh(model(x)).backward()
        with pytest.raises(UsageError, match="as it was before fully_shard"):
            early.step()
        twin = ModalTwin(mode)
        for when in ("after a forward", "after loading"):
            if when == "after a forward":
                twin.model(x)
            else:
                torch.manual_seed(9)
                state = Modal(mode).state_dict()
                twin.oracle.load_state_dict(state)
                twin.model.load_state_dict(
                    {k: nn.Parameter(v.clone(), requires_grad=False) for k, v in state.items()}, assign=True
                )
                for name, p in twin.oracle.named_parameters():
                    twin.model.get_parameter(name).requires_grad_(p.requires_grad)
            twin.micro_batches(_summed, inputs(2))
            twin.step()
            assert all(torch.equal(v, twin.oracle.state_dict()[k]) for k, v in full_state_dict(twin.model).items())


# --- changed weights, released weights (L10) ---


def _changed(modes: list[Mode]) -> None:
    for mode in modes:
        twin = ModalTwin(mode)
        x = batch(0, twin.rank, 2, WIDTH).requires_grad_()
        seen: list[torch.Tensor] = []
        handle = twin.model.blocks[1].up.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(m.weight) and None)
        loss = weigh(twin.model(x))
        handle.remove()
        if mode.reshard is True:
            with pytest.raises(RuntimeError, match="was released"):
                seen[0].sum()
        with torch.no_grad():
            twin.model.first.weight.add_(1)  # outside of every checkpoint: a recompute would just take the new values
            twin.oracle.first.weight.add_(1)
        with pytest.raises(UsageError, match="changed between this forward and its backward"):
            loss.backward()
        twin.model.zero_grad()
        twin.micro_batches(_summed, inputs(3))
        twin.step()


BODIES = (_packed, _optimisers, _changed)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_values_and_containers(body: Any) -> None:
    run_ranks(body, 2, 110, covering_modes())


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_values_and_containers_in_every_mode(body: Any) -> None:
    run_ranks(body, 3, 600, all_modes())


def test_covering() -> None:
    """Every two choices of different kinds meet in some mode."""
    modes = covering_modes()
    assert len(modes) < len(all_modes()) / 10
    for left, right in itertools.combinations(CHOICES, 2):
        met = {(getattr(m, left), getattr(m, right)) for m in modes}
        assert met == set(itertools.product(CHOICES[left], CHOICES[right]))


# --- a unit that runs both inside and outside a checkpoint ---


class InAndOut(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.reentrant = reentrant
        make_integer_(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.block(x)


def _in_and_out(reentrant: bool) -> None:
    for reshard in (True, False):
        twin = Twin(lambda: InAndOut(reentrant), shard_children("block", reshard_after_forward=reshard))
        twin.train(weighted_loss, lambda step, rank: batch(step, rank, 2, WIDTH).requires_grad_())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_inside_and_outside_a_checkpoint(world: int, reentrant: bool) -> None:
    run_ranks(_in_and_out, world, 60, reentrant)
