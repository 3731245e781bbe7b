"""The stress test on a handful of seeds, and that it finds what is wrong. `python tests/python/stress.py` runs many."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from stress_actions import ACTIONS, perform
from stress_cases import Action, Case, make_case
from stress_models import PACKS, Node, Plan, make
from stress_run import run
from stress_shrink import smaller_cases
from stress_twin import StressTwin


def passes(seeds: range, world: int) -> None:
    outcome = run((make_case(seed, world) for seed in seeds), world)
    assert not outcome.failures, "\n\n".join(map(str, outcome.failures))
    assert outcome.done > len(seeds) * 0.9


@pytest.mark.parametrize("world", [1, 2, 3])
def test_some_seeds(world: int) -> None:
    passes(range(1, 11), world)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_more_seeds(world: int) -> None:
    passes(range(100_000, 100_200), world)


def test_a_case_is_made_from_its_seed_alone() -> None:
    cases = [make_case(seed, 2) for seed in range(100)]
    assert cases == [make_case(seed, 2) for seed in range(100)]
    kinds = {node.kind for case in cases for node in case.tree.walk()}
    assert kinds >= {"linear", "adapter", "odd", "lookup", "choice", "parallel", "repeat", "again"}
    assert len({action.kind for case in cases for action in case.actions}) >= 15


def test_cases_and_smaller_ones_are_sound_models() -> None:
    for seed in range(10):
        case = make_case(seed, 2)
        for each in [case, *smaller_cases(case)]:
            model = make(each.tree)
            out = PACKS[each.tree.pack][1](model(torch.ones(2, 6), Plan(seed, 0, small=each.small)))
            assert all(t.shape == (2, 6) for t in out if t is not None)


CASE = Case(1, 2, Node("n1", "sequence", [Node("n2", "linear")], unit={"reshard": None}), [])
STEP = Action("train", {"salt": 1, "x_grad": True, "by_rank": True, "optimise": False, "none": True})


WRONG = {
    "parameter": "parts.0.weight on",
    "gradient": "parts.0.weight.grad on",
    "whole": "parts.0.weight: gradient None, expected",
    "collectives": "collectives by rank",
}


def _spoiled() -> dict[str, str]:
    said = {}
    for what in WRONG:
        twin = StressTwin(CASE)
        ACTIONS[STEP.kind](twin, STEP.has)
        if what == "parameter":
            twin.units[0].core.buckets[0].shard_view(0)[0] += 1
        elif what == "gradient":
            twin.model.parts[0].weight.grad._local_tensor[0] += 1
        elif what == "whole":
            twin.model.unshard()
        elif twin.rank == 1:
            twin.traffic.clear()
        try:
            perform(twin, "settings", {"kind": "after_forward", "unit": 0, "value": True})
        except AssertionError as error:
            said[what] = str(error)
    return said


def test_what_is_wrong_is_found() -> None:
    for said in run_ranks(_spoiled, 2, 60):
        assert said.keys() == WRONG.keys()
        assert all(WRONG[what] in text for what, text in said.items()), said
