// The minimum of a native test: a check that reports where it failed, and continues.
#pragma once

#include <cstdio>

namespace offload::test {

inline int n_failures = 0;

inline void report(bool holds, const char* text, const char* file, int line) {
  if (holds) return;
  ++n_failures;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, text);
}

// The exit status of a test program.
inline int result() { return n_failures == 0 ? 0 : 1; }

}  // namespace offload::test

#define CHECK_THAT(condition) offload::test::report((condition), #condition, __FILE__, __LINE__)
