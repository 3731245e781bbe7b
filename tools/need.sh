#!/bin/sh
# need.sh build|test: prints one line about the first thing that is missing, or nothing.
python=${PYTHON:-python3}
cxx=${CXX:-c++}

missing() {
  echo "$*"
  exit 0
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  missing "Python 3.10 or newer is needed, and '$python' is not: install python3 (or say which: make PYTHON=python3.12)"
[ -x .venv/bin/python ] || "$python" -c 'import ensurepip' 2>/dev/null ||
  missing "Python's venv is needed: install python3-venv (Debian, Ubuntu) or a full Python"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || missing "Python's headers are needed ($header): install python3-dev (Debian, Ubuntu) or python3-devel"
command -v cmake >/dev/null || missing "CMake 3.22 or newer is needed: install cmake"
echo '#include <span>' | "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
  missing "a C++20 compiler is needed, and '$cxx' is not: install g++ 11 or newer, or clang 14 or newer (or say which: make CXX=...)"
[ "$1" = build ] && exit 0
# Without an installed GoogleTest CMake fetches its sources, which needs the network.
echo '#include <gmock/gmock.h>' | "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
  timeout 20 git ls-remote -q "$(sed -n 's/.*GIT_REPOSITORY *//p' cmake/RaggedGTest.cmake)" HEAD >/dev/null 2>&1 ||
  missing "GoogleTest is needed for the C++ tests: install libgtest-dev and libgmock-dev (Debian, Ubuntu) or gtest-devel and gmock-devel"
