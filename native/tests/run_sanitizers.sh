#!/bin/sh
# Build the native tests under each sanitizer preset and run them. The sanitizers of addresses and of
# undefined behaviour share a build; the sanitizer of threads cannot be combined with them.
set -eu
cd "$(dirname "$0")/.."
for preset in memory thread; do
  echo "== sanitizers: $preset"
  cmake --preset "$preset" > /dev/null
  cmake --build --preset "$preset"
  ctest --preset "$preset"
done
