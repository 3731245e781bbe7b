#!/bin/sh
# Fuzzes the planner: tests/plan/fuzz/run.sh [SECONDS] (default 30). Needs clang with libFuzzer (Debian: clang libclang-rt-14-dev).
set -e
cd "$(dirname "$0")/../../.."
build=build-fuzz
mkdir -p $build/corpus
clang=${CLANGXX:-clang++}
command -v "$clang" >/dev/null || { echo "fuzz: $clang is not installed" >&2; exit 2; }
$clang -std=c++20 -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
  -Iinclude -Isrc -Itests src/plan/*.cc tests/plan/constraints.cc tests/plan/fuzz/plan_fuzz.cc -o $build/plan_fuzz
exec $build/plan_fuzz -max_total_time="${1:-30}" -timeout=10 -rss_limit_mb=4096 -max_len=512 -print_final_stats=1 \
  -artifact_prefix=$build/ $build/corpus
