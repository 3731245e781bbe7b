"""Runs a training from the command's process: over ranks started here, or as one rank of torchrun."""

from __future__ import annotations

import json as json_format
import os
import sys
import traceback
from pathlib import Path

from raggedfsdp import UsageError
from raggedfsdp.cli import checks, show
from raggedfsdp.cli.exits import FAILED, UNLIKE, USAGE
from raggedfsdp.cli.launch import LocalRanks
from raggedfsdp.cli.rank import join_torchrun, leave
from raggedfsdp.recipe import TrainOptions
from raggedfsdp.report import TrainReport
from raggedfsdp.training import train


def locally(options: TrainOptions, ranks: int, device: str, json: Path | None) -> int:
    checks.check_output(json)
    checks.check_ranks(ranks, device)
    corpus = checks.check_input(options)
    parameters = checks.count_parameters(options)
    if device == "cpu":
        checks.check_memory(options, ranks, parameters)
        checks.check_batch(options, ranks)
    with LocalRanks(options, ranks, device) as local:
        show.heading(options, ranks, parameters, corpus)
        with show.Progress(options.steps) as progress:
            report = local.follow(progress.step)
    return conclude(report, json)


def under_torchrun(options: TrainOptions, device: str, json: Path | None) -> int:
    try:
        first = os.environ["RANK"] == "0"
        if first:
            checks.check_output(json)
        corpus = checks.check_input(options)
        place = join_torchrun(device)
        if not first:
            train(options, place, lambda step: None)
            leave()
            return 0
        show.heading(options, place.ranks, checks.count_parameters(options), corpus)
        with show.Progress(options.steps) as progress:
            report = train(options, place, progress.step)
        leave()
        return conclude(report, json)
    except UsageError as e:
        # Wrong input is wrong on every rank; one rank per machine says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"raggedfsdp: {e}", file=sys.stderr)
        return USAGE
    except Exception as e:
        if os.environ.get("RAGGED_TRACEBACK"):
            traceback.print_exc()
        print(f"raggedfsdp: rank {os.environ['RANK']}: {type(e).__name__}: {e}".splitlines()[0], file=sys.stderr)
        return FAILED


def conclude(report: TrainReport, json: Path | None) -> int:
    show.result(report)
    if json is not None:
        write_json(report, json)
    return 0 if report.verify is None or report.verify.passed else UNLIKE


def write_json(report: TrainReport, path: Path) -> None:
    """The whole file or none of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json_format.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise UsageError(f"--json: cannot write {path}: {e.strerror}") from e
