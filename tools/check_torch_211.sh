#!/bin/sh
# Syntax-checks the engine and its bindings against the headers of the oldest torch supported. Downloads that torch once, half a
# gigabyte, and keeps its headers in build-torch211/: not for CI. check_torch_211.sh [FOLDER_WITH_THE_WHEEL]
cd "$(dirname "$0")/.." || exit 1
version=2.11.0
folder=build-torch211
python=.venv/bin/python

if [ ! -f $folder/torch/version.py ]; then
  wheels=${1:-$folder}
  [ -n "$1" ] || $python -m pip download --quiet --no-deps --dest "$wheels" torch==$version || exit 1
  $python - "$wheels" $folder $version <<'END' || exit 1
import sys, zipfile
from pathlib import Path
wheels, folder, version = sys.argv[1:]
wheel = zipfile.ZipFile(next(Path(wheels).glob(f"torch-{version}*.whl")))
wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("torch/include/") or n == "torch/version.py"])
END
  [ -n "$1" ] || rm -f $folder/*.whl
fi

export CXX="${CXX:-c++}" include=$folder/torch/include
export python_include=$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')
find src python/bindings -name '*.cc' ! -path 'src/plan/*' | sort | xargs -n 1 -P "$(nproc)" sh -c '
  $CXX -std=c++20 -fsyntax-only -w -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DTORCH_EXTENSION_NAME=_C -DRAGGED_TORCH_VERSION=\"\" \
    -Iinclude -Isrc -Ipython/bindings -isystem $include -isystem $include/torch/csrc/api/include -isystem $python_include "$0" &&
    echo "ok: $0" || { echo "failed: $0"; exit 1; }' && echo "torch $version: all compile"
