"""What the tables say, from reports made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from raggedfsdp import UsageError
from raggedfsdp.cli import run
from raggedfsdp.cli.exits import UNLIKE
from raggedfsdp.cli.tables import memory_table, units_table, verdict, verify_table
from raggedfsdp.report import MemoryReport, ParameterDifference, StepReport, TrainReport, UnitReport, VerifyReport

pytestmark = pytest.mark.timeout(60)
UNIT = UnitReport("model.layers.0", 1000, 9, 4, 256, 24, 1, "float32", 1024, 8192, 4096)
MEMORY = MemoryReport(2048, 5 * 2**20, 3 * 2**30, 1023)
VERIFY = VerifyReport(1e-7, 2e-7, 3e-5, 1e-5, 1e-5, 1e-3, (ParameterDifference("lm_head.weight", 6e-8, 3e-5),))
STEPS = (StepReport(1, 5.5, 7.0, 100, 1.0), StepReport(2, 5.0, 6.0, 100, 0.5))
REPORT = TrainReport("llama-tiny", 1000, 4, "fp32", STEPS, 200.0, (UNIT,), MEMORY, VERIFY)


def text_of(table: Table, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_units() -> None:
    text = text_of(units_table((UNIT, replace(UNIT, unit="root (Llama)", parameters=2_500_000, padding_numel=0))))
    row = next(line for line in text.splitlines() if line.startswith("model.layers.0"))
    assert row.split() == ["model.layers.0", "1,000", "1.0", "KiB", "24", "(2", "%)", "8.0", "KiB", "4.0", "KiB"]
    assert text.splitlines()[-1].split()[:3] == ["root", "2.5", "M"]
    assert "buckets" not in text
    assert "buckets" in text_of(units_table((replace(UNIT, buckets=2),)))


def test_many_units_that_differ_by_name_only_are_one_row() -> None:
    layers = tuple(replace(UNIT, unit=f"model.layers.{i}") for i in range(80))
    text = text_of(units_table((*layers, replace(UNIT, unit="root", parameters=7))))
    assert "model.layers.0-79 " in text
    assert "model.layers.5" not in text
    assert "root" in text


def test_memory() -> None:
    assert text_of(memory_table(MEMORY)).splitlines()[-1].split() == ["2.0", "KiB", "5.0", "MiB", "3.0", "GiB", "1023", "B"]


def test_verify_shows_every_parameter() -> None:
    text = text_of(verify_table(VERIFY))
    assert "lm_head.weight" in text
    assert "6.0e-08" in text
    many = tuple(ParameterDifference(f"p{i}", 0.0, float(i)) for i in range(150))
    text = text_of(verify_table(replace(VERIFY, parameters=many)))
    assert "p149" in text
    assert "p49 " not in text
    assert "50 that differ less" in text


@pytest.mark.parametrize("field", ["loss", "gradient_norm", "parameter"])
@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_a_difference_beyond_tolerance_fails(field: str, value: float) -> None:
    worse = replace(VERIFY, **{field: value})  # type: ignore[arg-type]
    assert not worse.passed
    assert field.split("_")[0] in verdict(worse)
    assert run.conclude(replace(REPORT, verify=worse), None) == UNLIKE


def test_within_tolerance_passes() -> None:
    assert "within tolerance" in verdict(VERIFY)
    assert run.conclude(REPORT, None) == 0
    assert run.conclude(replace(REPORT, verify=None), None) == 0


def test_json_holds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    run.write_json(REPORT, path)
    values = json.loads(path.read_text())
    assert values["loss"] == [5.5, 5.0]
    assert values["tokens_per_s"] == 200.0
    assert values["units"][0]["gathered_bytes_per_step"] == 8192
    assert values["memory"]["peak_bytes"] == 1023
    assert values["verify"]["passed"] is True
    assert values["verify"]["parameters"] == [{"parameter": "lm_head.weight", "largest": 6e-8, "relative": 3e-5}]
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json: cannot write"):
        run.write_json(REPORT, tmp_path / "missing" / "report.json")
