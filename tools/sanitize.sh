#!/bin/sh
# The C++ tests under AddressSanitizer with UBSan, then under ThreadSanitizer: sanitize.sh [asan] [tsan].
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1
# TSan of older compilers cannot map its shadow where addresses are highly randomised.
fixed=$(setarch -R true 2>/dev/null && echo "setarch -R")
[ $# -gt 0 ] || set -- asan tsan
for preset in "$@"; do
  [ -f "build-$preset/CMakeCache.txt" ] || generator=$(command -v ninja >/dev/null && echo "-G Ninja")
  cmake --preset "$preset" --log-level=WARNING $generator >/dev/null &&
    cmake --build --preset "$preset" --parallel "$(nproc)" && $fixed ctest --preset "$preset" || exit 1
done
