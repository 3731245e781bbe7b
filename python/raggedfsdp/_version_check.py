"""The extension uses torch's C++ interface, which changes from one minor version to the next."""

from __future__ import annotations

OLDEST = (2, 11)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def built_for() -> str:
    """The torch that the extension was built for, known before the extension is loaded: a wrong one may not load at all."""
    try:
        from raggedfsdp._build import TORCH_VERSION
    except ModuleNotFoundError as error:
        raise ImportError("raggedfsdp's C++ core is not built: run `make build` in the checkout") from error
    return TORCH_VERSION


def check_torch(built_for: str) -> None:
    """Raises ImportError unless the torch that is installed is one that this build can run with."""
    import torch

    if _minor(torch.__version__) < OLDEST:
        raise ImportError(f"raggedfsdp needs torch 2.11 or newer, and torch {torch.__version__} is installed: upgrade torch")
    if _minor(torch.__version__) != _minor(built_for):
        raise ImportError(
            f"raggedfsdp was built for torch {built_for}, and torch {torch.__version__} is installed: rebuild it "
            "(`make build` in a checkout, or `pip install --no-build-isolation --force-reinstall --no-deps .`), "
            f"or install torch {'.'.join(built_for.split('.')[:2])}"
        )
