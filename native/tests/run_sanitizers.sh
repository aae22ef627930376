#!/bin/sh
# Build the native tests under each sanitizer preset and run them.
set -eu
cd "$(dirname "$0")/.."
for preset in address undefined thread; do
  echo "== $preset sanitizer"
  cmake --preset "$preset" > /dev/null
  cmake --build --preset "$preset"
  ctest --preset "$preset"
done
