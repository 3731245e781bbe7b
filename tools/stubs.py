"""Writes python/raggedfsdp/_C.pyi from the built extension; with --check, says whether the one in git is current."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parent.parent / "python" / "raggedfsdp" / "_C.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "raggedfsdp._C", "-o", folder]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if run.returncode:
            sys.exit(f"stubs: pybind11-stubgen failed:\n{run.stdout}{run.stderr}")
        text = Path(folder, "raggedfsdp", "_C.pyi").read_text()
    # What pybind11 takes for an int is wider, but callbacks are given ints, and the stub should read well.
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    # The version of torch differs between machines, the interface doesn't.
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("BUILT_FOR_TORCH:")) + (
        "BUILT_FOR_TORCH: str\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = generate()
    if check and (not STUB.exists() or STUB.read_text() != text):
        print("stubs: python/raggedfsdp/_C.pyi is out of date: run `make stubs` and commit it")
        return 1
    if not check:
        STUB.write_text(text)
    print(f"stubs: {STUB.name} is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
