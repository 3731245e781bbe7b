"""The laws of the planner, on random buckets."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedfsdp import UsageError
from raggedfsdp.plan import (
    Granularity,
    Plan,
    PlanOptions,
    TensorSpec,
    UnitPlanOptions,
    explain_padding,
    plan_bucket,
    plan_unit,
    ragged_cut,
    read_policy,
)

laws = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def specs(draw: st.DrawFn, name: str = "t") -> TensorSpec:
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    most = max(1, TensorSpec(name, shape, 1).numel())
    return TensorSpec(name, shape, draw(st.integers(1, most)))


buckets = st.lists(specs(), min_size=1, max_size=9)
options = st.builds(PlanOptions, devices=st.integers(1, 9), alignment_numel=st.sampled_from([1, 2, 8]))


def check_constraints(plan: Plan, alignment: int) -> None:
    shard = plan.shard_numel
    assert shard % alignment == 0
    spans = sorted((begin, begin + t.numel()) for t, begin in zip(plan.tensors, plan.offsets, strict=True) if t.numel())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))  # no overlap
    assert all(end <= plan.devices * shard for _, end in spans)
    for tensor, begin in zip(plan.tensors, plan.offsets, strict=True):
        for boundary in range(shard, plan.devices * shard, shard) if shard else ():
            if begin < boundary < begin + tensor.numel():
                assert (boundary - begin) % tensor.block_numel == 0


@laws
@given(buckets, options)
def test_the_three_constraints_hold(tensors: list[TensorSpec], options: PlanOptions) -> None:
    plan = plan_bucket(tensors, options)
    check_constraints(plan, options.alignment_numel)
    assert plan.tensors == tensors
    assert plan.useful_numel() + plan.padding_numel() == plan.global_numel() == options.devices * plan.shard_numel
    assert sum(gap.numel() for gap in plan.gaps()) == plan.padding_numel()


@laws
@given(buckets, options)
def test_shards_add_up_to_tensors_and_cuts_reproduce_them(tensors: list[TensorSpec], options: PlanOptions) -> None:
    plan = plan_bucket(tensors, options)
    for i, tensor in enumerate(tensors):
        owned = [plan.owned(i, rank) for rank in range(options.devices)]
        assert sum(part.numel() for part in owned) == tensor.numel()
        cut = ragged_cut(plan, i)
        assert list(cut.dims) == list(range(len(cut.dims)))
        units = sum(cut.local_units)
        unit = tensor.numel() // units if units else 0
        assert [unit * n for n in cut.local_units] == [part.numel() for part in owned]


@laws
@given(buckets, options)
def test_the_same_input_gives_the_same_plan(tensors: list[TensorSpec], options: PlanOptions) -> None:
    assert plan_bucket(tensors, options) == plan_bucket(list(tensors), options)


@laws
@given(buckets, options, st.randoms(use_true_random=False))
def test_permuting_equal_tensors_changes_nothing(tensors: list[TensorSpec], options: PlanOptions, random) -> None:
    named = [TensorSpec(f"t{i}", t.shape, t.block_numel) for i, t in enumerate(tensors * 2)]
    alike: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for t in named:
        alike.setdefault((tuple(t.shape), t.block_numel), []).append(t.name)
    for names in alike.values():
        random.shuffle(names)
    renamed = [TensorSpec(alike[tuple(t.shape), t.block_numel].pop(), t.shape, t.block_numel) for t in named]
    a, b = plan_bucket(named, options), plan_bucket(renamed, options)
    assert (a.offsets, a.shard_numel, a.order) == (b.offsets, b.shard_numel, b.order)


@laws
@given(buckets, st.integers(1, 9), st.integers(2, 1000))
def test_scaling_everything_scales_the_plan(tensors: list[TensorSpec], devices: int, scale: int) -> None:
    """k times the sizes, blocks and alignment: k times the shard. (With alignment 1 a finer shard might do.)"""
    flat = [TensorSpec("t", [t.numel()], t.block_numel) for t in tensors]
    scaled = [TensorSpec("t", [scale * t.numel()], scale * t.block_numel if t.numel() else 1) for t in tensors]
    small = plan_bucket(flat, PlanOptions(devices=devices))
    large = plan_bucket(scaled, PlanOptions(devices=devices, alignment_numel=scale))
    assert large.shard_numel == scale * small.shard_numel
    assert large.offsets == [scale * offset for offset in small.offsets]


@laws
@given(buckets, options)
def test_the_shard_is_at_most_twice_the_bound(tensors: list[TensorSpec], options: PlanOptions) -> None:
    plan = plan_bucket(tensors, options)
    assert plan.bound_shard_numel <= plan.shard_numel <= 2 * plan.bound_shard_numel


@laws
@given(buckets, st.integers(1, 9), st.integers(1, 4), st.integers(0, 50))
def test_a_unit_holds_every_tensor_once_in_valid_buckets(tensors, devices: int, most: int, cost: int) -> None:
    unit = plan_unit(tensors, UnitPlanOptions(devices, max_buckets=most, element_bytes=1, collective_cost_bytes=cost))
    assert sorted(i for bucket in unit.buckets for i in bucket.members) == list(range(len(tensors)))
    assert len(unit.buckets) <= most
    for bucket in unit.buckets:
        assert bucket.plan.tensors == [tensors[i] for i in bucket.members]
        check_constraints(bucket.plan, 1)
    saved = unit.one_bucket_padding_numel - unit.padding_numel()
    assert saved >= cost * (len(unit.buckets) - 1)


@laws
@given(buckets, st.integers(1, 9))
def test_values_survive_pickling(tensors: list[TensorSpec], devices: int) -> None:
    unit = plan_unit(tensors, UnitPlanOptions(devices, collective_cost_bytes=0))
    report = explain_padding(tensors, UnitPlanOptions(devices), 0.1)
    for value in (unit, report, unit.buckets[0].plan, tensors[0], UnitPlanOptions(devices)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_granularity_is_a_value() -> None:
    rows = Granularity.rows(16)
    assert rows == Granularity.parse("rows(16)") == pickle.loads(pickle.dumps(rows))
    assert hash(rows) == hash(Granularity.rows(16))
    assert rows.block_numel((64, 8)) == 128
    with pytest.raises(UsageError, match="row"):
        Granularity.parse("row(3)")


def test_describe_shows_the_devices() -> None:
    plan = plan_bucket([TensorSpec("wq", (4, 3), 3), TensorSpec("b", (5,), 5)], PlanOptions(devices=2))
    assert "device 1: wq[9, 12) b[0, 5) + 1 padding" in plan.describe()


def test_a_policy_file_takes_the_first_match(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"*.experts.*": "matrix", "*.weight": "rows(4)", "*": "elements"}))
    policy = read_policy(path)
    assert policy("mlp.experts.up", (2, 3, 4)) == Granularity.matrix()
    assert policy("q.weight", (8, 8)) == Granularity.rows(4)
    assert policy("q.bias", (8,)) == Granularity.elements()


@pytest.mark.parametrize(
    ("content", "says"),
    [("[1]", "must hold one object"), ("{", "not JSON"), ('{"*": "rows"}', "rows"), ('{"a": "matrix"}', "no pattern for")],
)
def test_a_wrong_policy_says_what_is_wrong(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=says):
        read_policy(path)("q.bias", (8,))
