"""House rules that a compiler does not check: which folder may include which, and how long a file may be."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = {"plan": 0, "comm": 1, "tensor": 2, "buffer": 3, "engine": 4, "optim": 5, "quant": 5, "checkpoint": 5, "bindings": 6}
HEADERS = {  # the layer of each public header
    "error": "plan",
    "granularity": "plan",
    "plan": "plan",
    "plan_unit": "plan",
    "padding_report": "plan",
    "comm": "comm",
    "comm_backends": "comm",
    "mesh": "comm",
    "placement": "tensor",
    "redistribute": "tensor",
    "dtensor": "tensor",
    "dbuffer": "buffer",
    "fully_shard": "engine",
    "unit_options": "engine",
    "ragged": "engine",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
CUDA = re.compile(r"^(cuda|cublas|nccl|c10/cuda|ATen/cuda)")
UMBRELLA = {"torch/torch.h", "torch/extension.h", "torch/all.h", "ATen/ATen.h"}
LONGEST_LINES = 400


def layer_of(path: str) -> str | None:
    """The layer of a file, by its path from the root; None where any layer may be included."""
    folder, _, rest = path.partition("/")
    if folder == "include":
        return HEADERS.get(Path(path).stem)
    if folder in ("src", "tests"):
        return rest.partition("/")[0] if rest.partition("/")[0] in ORDER else None
    return "bindings" if path.startswith("python/bindings/") else None


def target_of(include: str) -> str | None:
    """The layer that an #include reaches; None for what isn't ours."""
    if include.startswith("ragged/"):
        return layer_of(f"include/{include}")
    return layer_of(f"src/{include}") if (ROOT / "src" / include).is_file() else None


def problems(path: Path) -> Iterator[str]:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    own = layer_of(name)
    if name.startswith("include/") and own is None:
        yield f"{name}: a public header without a layer: add it to HEADERS in tools/check_layers.py"
    if text.count("\n") > LONGEST_LINES:
        yield f"{name}: {text.count(chr(10))} lines; split it (at most {LONGEST_LINES})"
    if path.suffix == ".py":
        return
    for include in INCLUDE.findall(text):
        target = target_of(include)
        if own and target and (ORDER[target] > ORDER[own] or (ORDER[target] == ORDER[own] and target != own)):
            yield f"{name}: includes {include}: {own} must not know {target}"
        if CUDA.match(include) and path.suffix not in (".cu", ".cuh"):
            yield f"{name}: includes {include}: CUDA headers belong in .cu files"
        if include in UMBRELLA:
            yield f"{name}: includes {include}: name the narrow headers instead (seconds per file)"
    if name.startswith(("include/", "src/")) and not name.startswith("src/comm/c10d/"):
        code = [*INCLUDE.findall(text), COMMENT.sub("", text)]
        if any(re.search(r"\bc10d\b", piece) for piece in code):
            yield f"{name}: names c10d, which only src/comm/c10d/ may"


def main() -> int:
    folders = ("include", "src", "python", "tests", "bench", "examples", "tools")
    files = (f for folder in folders for f in sorted((ROOT / folder).rglob("*")))
    checked = [f for f in files if f.suffix in (".h", ".cc", ".cu", ".cuh", ".py") and "__pycache__" not in f.parts]
    found = [problem for f in checked for problem in problems(f)]
    print("\n".join(found) if found else f"layers: {len(checked)} files in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
