"""The tests here need a GPU and run by tests/gpu/run; `make test` does not collect them. They share tests/python's helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parent.parent / "python"
if str(HELPERS) not in sys.path:
    sys.path.insert(0, str(HELPERS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
