"""What is checked before any rank starts, so that a wrong input costs seconds and one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import transformers

from raggedfsdp import UsageError
from raggedfsdp.cli.rank import device_of
from raggedfsdp.cli.train import available_cores
from raggedfsdp.data import VOCABULARY, Corpus, Draw, open_corpus
from raggedfsdp.models import build_model, load_config
from raggedfsdp.recipe import TrainOptions, check_config

_RANKS_PER_CORE = 8


def check_input(options: TrainOptions) -> Corpus:
    transformers.logging.set_verbosity_error()  # what it would advise is about inference and kernels to install
    check_config(load_config(options.model), options)
    corpus = open_corpus(options.data)
    corpus.batch(Draw(options.seed, 1, 0, 0), 1, options.sequence)
    return corpus


def check_output(json: Path | None) -> None:
    if json is None:
        return
    if json.is_dir():
        raise UsageError(f"--json: {json} is a folder; name a file in it")
    folder = json.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--json: there is no folder {folder} to write {json.name} in")
    if not os.access(json if json.exists() else folder, os.W_OK):
        raise UsageError(f"--json: {json} cannot be written: no permission")


def check_ranks(ranks: int, device: str) -> None:
    most = _RANKS_PER_CORE * available_cores()
    if ranks > most:
        raise UsageError(
            f"--ranks {ranks}: every rank started here needs a share of {available_cores()} cores, and more than {most} "
            f"would mostly wait for each other; use torchrun to spread ranks over machines"
        )
    device_of(device, ranks - 1)


def count_parameters(options: TrainOptions) -> int:
    return sum(p.numel() for p in build_model(load_config(options.model), "meta").parameters())


def check_batch(options: TrainOptions, ranks: int) -> None:
    """The logits alone are a lower bound of what a forward holds."""
    vocabulary = getattr(load_config(options.model), "vocab_size", VOCABULARY)
    logits = 4 * ranks * options.batch * options.sequence * vocabulary
    free = _free_bytes()
    if free is not None and logits > free:
        raise UsageError(
            f"--batch {options.batch} --sequence {options.sequence}: the logits of {ranks} ranks alone need "
            f"{logits / 2**30:,.0f} GiB of memory here, and {free / 2**30:,.0f} GiB are free; give smaller ones"
        )


def check_memory(options: TrainOptions, ranks: int, parameters: int) -> None:
    """Every rank builds the model before it keeps its shard; parameters, gradients and two moments are then held once."""
    needed = 4 * parameters * max(ranks + 1, 4 + (6 if options.verify else 1))
    free = _free_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"--model {options.model}: {parameters / 1e9:.1f} B parameters on {ranks} ranks need at least "
            f"{needed / 2**30:,.0f} GiB of memory here, and {free / 2**30:,.0f} GiB are free; train a smaller model"
        )


def _free_bytes() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
