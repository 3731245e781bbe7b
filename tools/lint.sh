#!/bin/sh
# Every check that is not a test. --fix formats in place and stops there.
# clang-tidy reads the planner and the C++ files changed since the main branch, at most TIDY_FILES of them (default 4).
cd "$(dirname "$0")/.." || exit 1
bin=.venv/bin
sources=$(git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh')
if [ "$1" = --fix ]; then
  $bin/clang-format -i $sources && $bin/ruff check --quiet --fix . && exec $bin/ruff format --quiet .
fi

status=0
check() {
  name=$1
  shift
  "$@" || { echo "lint: $name failed"; status=1; }
}

tidy_files() {
  git ls-files 'src/plan/*.cc'
  base=$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse -q --verify HEAD~1)
  [ -z "$base" ] || git diff --name-only --diff-filter=d "$base" -- 'src/*.cc' ':!src/plan' | head -n "${TIDY_FILES:-4}"
}

tidy() {
  tidy_files | xargs -n 1 -P "$(nproc)" $bin/clang-tidy -p build --quiet --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-deprecated-declarations 2>build/tidy.log ||
    { cat build/tidy.log; return 1; }
}

check layers $bin/python tools/check_layers.py
check clang-format $bin/clang-format --dry-run -Werror $sources
check "ruff check" $bin/ruff check --quiet .
check "ruff format" $bin/ruff format --quiet --check .
check mypy $bin/mypy
check stubs $bin/python tools/stubs.py --check
check headers cmake --build build --target ragged_headers --parallel "$(nproc)"
check clang-tidy tidy
[ $status = 0 ] && echo "lint: all passed"
exit $status
