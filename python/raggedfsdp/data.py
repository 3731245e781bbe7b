"""Text as tokens: bytes of files, cut into windows. Nothing is downloaded and nothing is kept in memory."""

from __future__ import annotations

import os
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from raggedfsdp import UsageError

if TYPE_CHECKING:
    import torch

VOCABULARY = 256  # a token is a byte
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Draw:
    """Which batch: the same draw gives the same windows on every machine, for any number of ranks."""

    seed: int
    step: int
    micro_batch: int
    rank: int


class Corpus:
    """The files' bytes one after another, read where a batch needs them."""

    def __init__(self, name: str, files: list[tuple[Path, int]]) -> None:
        self.name = name
        self._files = files
        self._ends = list(accumulate(size for _, size in files))

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`, across the ends of files."""
        parts: list[bytes] = []
        i = bisect_right(self._ends, offset)
        while count > 0:
            path, size = self._files[i]
            start = offset - (self._ends[i] - size)
            part = self._read_file(path, start, min(count, size - start))
            parts.append(part)
            offset, count, i = offset + len(part), count - len(part), i + 1
        return b"".join(parts)

    def _read_file(self, path: Path, start: int, count: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(start)
                part = file.read(count)
        except OSError as e:
            raise UsageError(f"--data: cannot read {path}: {e.strerror}") from e
        if len(part) < count:
            raise UsageError(f"--data: {path} became shorter while training on it; leave the files as they are")
        return part

    def batch(self, draw: Draw, batch: int, sequence: int) -> torch.Tensor:
        """(batch, sequence) token ids."""
        import torch

        if self.size_bytes < sequence:
            raise UsageError(
                f"--data: {self.name} holds {self.size_bytes} bytes, fewer than one sequence of {sequence}; "
                f"give more text or --sequence {self.size_bytes} or less"
            )
        # A string seeds through SHA-512, which no version of Python changes; a tuple would not.
        chance = random.Random(f"{draw.seed}/{draw.step}/{draw.micro_batch}/{draw.rank}")
        starts = [chance.randrange(self.size_bytes - sequence + 1) for _ in range(batch)]
        flat = bytearray(b"".join(self.read(start, sequence) for start in starts))
        return torch.frombuffer(flat, dtype=torch.uint8).view(batch, sequence).long()


def open_corpus(path: Path | None) -> Corpus:
    """A file, the text files of a folder, or, without a path, the sources of Python's standard library."""
    if path is None:
        return _standard_library()
    if not path.exists():
        raise UsageError(f"--data: there is no {path}; give a file or a folder of text")
    files = _with_sizes(_text_files(path)) if path.is_dir() else _with_sizes([path])
    if not files:
        kind = "no file with text in it" if path.is_dir() else "no text: it is empty"
        raise UsageError(f"--data: {path} holds {kind}")
    return Corpus(str(path), files)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in _walk(root) if p.suffix == ".py"]
    if not files:
        raise UsageError(f"--data: the standard library's sources are not in {root}; give a file or a folder of text")
    return Corpus("Python's standard library", _with_sizes(files))


def _walk(root: Path) -> Iterator[Path]:
    """Files below root in an order that all ranks share, without hidden ones and installed packages."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("site-packages", "__pycache__"))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _text_files(root: Path) -> list[Path]:
    return [p for p in _walk(root) if p.is_file() and os.access(p, os.R_OK) and not _is_binary(p)]


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_PROBE_BYTES)


def _with_sizes(paths: list[Path]) -> list[tuple[Path, int]]:
    try:
        sizes = [(p, p.stat().st_size) for p in paths]
    except OSError as e:
        raise UsageError(f"--data: cannot read {e.filename}: {e.strerror}") from e
    return [(p, size) for p, size in sizes if size > 0]
