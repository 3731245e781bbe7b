"""Writes the tables of docs/planner.md; with --check, says whether those in git are current.

tools/planner_tables.py [--check]
build/bench/plan_bench --benchmark_format=json | tools/planner_tables.py --times
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from raggedfsdp.cli.plan_run import shapes_of
from raggedfsdp.plan import ModelPlan, UnitPlanOptions, UnitShapes, plan_model, rows_policy

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "planner.md"
MODELS = ("llama3-70b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3", "deepseek-v3 --split-experts")
ROWS = (1, 16, 32, 128)
DEVICES = (8, 64, 512, 1024, 4096, 16384)


def tables() -> str:
    return "\n\n".join(table(model) for model in MODELS)


def table(model: str) -> str:
    name, _, split = model.partition(" --")
    shapes = shapes_of(name, split_experts=bool(split))
    lines = [f"`raggedfsdp plan --model {model}`", "", "| devices | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |"]
    lines.append("|---:|" + "---:|" * len(ROWS))
    lines += [f"| {n:,} | " + " | ".join(cell(shapes, n, rows) for rows in ROWS) + " |" for n in DEVICES]
    return "\n".join(lines)


def cell(shapes: Sequence[UnitShapes], devices: int, rows: int) -> str:
    """Padding, and in brackets what it would be in one bucket a unit, where that differs."""
    split, one = (plan(shapes, devices, rows, most) for most in (4, 1))
    before, after = percent(one.padding), percent(split.padding)
    return after if before == after else f"{after} ({before})"


def plan(shapes: Sequence[UnitShapes], devices: int, rows: int, max_buckets: int) -> ModelPlan:
    return plan_model(shapes, rows_policy(rows), UnitPlanOptions(devices, alignment_numel=8, max_buckets=max_buckets))


def percent(value: float) -> str:
    return f"{100 * value:.2f} %" if value < 1 else f"{100 * value:,.0f} %"


def times(report: str) -> str:
    """Of google-benchmark's JSON: the slowest rows of each model and number of devices, and growth."""
    found = json.loads(report)["benchmarks"]
    models: dict[str, dict[int, float]] = {}
    for entry in found:
        if match := re.match(r"Model/([^/]+)/devices:(\d+)/", entry["name"]):
            slowest = models.setdefault(match[1], {})
            slowest[int(match[2])] = max(slowest.get(int(match[2]), 0.0), entry["cpu_time"])
    devices = sorted(next(iter(models.values())))
    lines = ["| slowest of 1, 16, 32, 128 rows | " + " | ".join(f"{n:,} devices" for n in devices) + " |"]
    lines.append("|---|" + "---:|" * len(devices))
    lines += [f"| {name} | " + " | ".join(f"{row[n]:.2f}" for n in devices) + " |" for name, row in models.items()]
    return "\n".join([*lines, "", *growth(found)])


def growth(found: list[dict[str, object]]) -> Iterator[str]:
    for kind, text in (
        ("tensors", "tensors, 1,024 devices"),
        ("kinds", "tensors, no two alike"),
        ("devices", "devices, 782 tensors"),
    ):
        rows = [(e["name"], e["cpu_time"]) for e in found if re.fullmatch(rf"Growth/{kind}/\d+", str(e["name"]))]
        yield "| " + text + " | " + " | ".join(f"{int(str(name).rpartition('/')[2]):,}" for name, _ in rows) + " |"
        yield "|---|" + "---:|" * len(rows)
        yield "| one unit | " + " | ".join(f"{time:.2f}" for _, time in rows) + " |"
        yield ""


def replace(text: str, mark: str, content: str) -> str:
    return re.sub(
        rf"<!-- {mark} -->.*<!-- /{mark} -->", f"<!-- {mark} -->\n{content.strip()}\n<!-- /{mark} -->", text, flags=re.DOTALL
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--times", action="store_true", help="read the bench's JSON from stdin and write its table instead")
    options = parser.parse_args()
    before = DOCUMENT.read_text()
    after = replace(before, "times", times(sys.stdin.read())) if options.times else replace(before, "tables", tables())
    if options.check and before != after:
        print("docs/planner.md is out of date: run tools/planner_tables.py and commit it")
        return 1
    if not options.check:
        DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
