from __future__ import annotations

import pytest
import torch

from raggedfsdp._version_check import built_for, check_torch


def test_accepts_what_it_was_built_for() -> None:
    assert built_for() == torch.__version__
    check_torch(built_for())


@pytest.mark.parametrize("other", ["2.10.0", "2.12.1+cpu", "3.0.0a0+git1234"])
def test_another_minor_version_is_named(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    check_torch("2.13.0+cpu")
    with pytest.raises(ImportError, match=rf"built for torch {other[:4]}.*torch 2\.13\.1 is installed.*rebuild"):
        check_torch(other)


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, and torch 2\.9\.1"):
        check_torch("2.9.1")
