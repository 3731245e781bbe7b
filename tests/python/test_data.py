from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedfsdp import UsageError
from raggedfsdp.data import Draw, open_corpus

pytestmark = pytest.mark.timeout(60)
DRAW = Draw(seed=0, step=1, micro_batch=0, rank=0)


def folder_of(root: Path, **texts: bytes) -> Path:
    for name, text in texts.items():
        (root / f"{name}.txt").write_bytes(text)
    return root


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.binary(max_size=9).filter(lambda t: b"\0" not in t), min_size=1, max_size=6), data=st.data())
def test_read_is_a_slice_of_the_files_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(texts)
    if not whole:
        return
    root = folder_of(tmp_path_factory.mktemp("corpus"), **{f"f{i}": t for i, t in enumerate(texts)})
    corpus = open_corpus(root)
    assert corpus.size_bytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert corpus.read(start, count) == whole[start : start + count]


def test_a_batch_is_windows_of_the_text_and_depends_on_the_draw_alone(tmp_path: Path) -> None:
    text = bytes(range(1, 256)) * 5
    path = tmp_path / "text"
    path.write_bytes(text)
    batch = open_corpus(path).batch(DRAW, 3, 20)
    assert batch.shape == (3, 20)
    assert batch.dtype == torch.int64
    assert all(bytes(row.tolist()) in text for row in batch)
    assert torch.equal(batch, open_corpus(path).batch(DRAW, 3, 20))
    others = [Draw(1, 1, 0, 0), Draw(0, 2, 0, 0), Draw(0, 1, 1, 0), Draw(0, 1, 0, 1)]
    assert all(not torch.equal(batch, open_corpus(path).batch(d, 3, 20)) for d in others)


def test_the_draw_is_the_same_on_every_machine(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    assert open_corpus(path).batch(DRAW, 4, 2)[:, 0].tolist() == [15, 55, 47, 33]


def test_a_text_of_exactly_one_sequence(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd")
    assert open_corpus(path).batch(DRAW, 2, 4).tolist() == [[97, 98, 99, 100]] * 2
    with pytest.raises(UsageError, match=r"holds 4 bytes, fewer than one sequence of 5.*--sequence 4"):
        open_corpus(path).batch(DRAW, 1, 5)


def test_a_folder_is_its_text_files(tmp_path: Path) -> None:
    folder_of(tmp_path, a=b"aaa", b=b"x\0y", c=b"")
    (tmp_path / ".hidden").write_bytes(b"hhh")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.md").write_bytes(b"ddd")
    corpus = open_corpus(tmp_path)
    assert corpus.read(0, corpus.size_bytes) == b"aaaddd"


def test_without_a_path_it_is_the_standard_library() -> None:
    corpus = open_corpus(None)
    assert corpus.size_bytes > 1_000_000
    assert "standard library" in corpus.name
    assert corpus.batch(DRAW, 1, 64).max() < 256


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder", "binary folder"])
def test_nothing_to_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    if kind == "empty file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
        if kind == "binary folder":
            (path / "x.bin").write_bytes(b"\0\1\2")
    expected = {"missing": "there is no", "empty file": "no text: it is empty"}.get(kind, "no file with text")
    with pytest.raises(UsageError, match=expected):
        open_corpus(path)


def test_a_file_that_shrinks_or_goes_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 100)
    corpus = open_corpus(path)
    os.truncate(path, 10)
    with pytest.raises(UsageError, match=f"{path} became shorter"):
        corpus.read(5, 50)
    path.unlink()
    with pytest.raises(UsageError, match=f"cannot read {path}"):
        corpus.read(5, 50)
