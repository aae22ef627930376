// The minimum of a native test: a check that reports where it failed, and continues.
#pragma once

#include <cstdio>
#include <string>

namespace offload::test {

inline int n_failures = 0;

inline void report(bool holds, const char* text, const char* file, int line) {
  if (holds) return;
  ++n_failures;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, text);
}

// The exit status of a test program.
inline int result() { return n_failures == 0 ? 0 : 1; }

// The message of the Error that `work` throws; empty if it throws none.
template <typename Error, typename Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Whether `work` throws an Error.
template <typename Error, typename Work>
bool throws(const Work& work) {
  try {
    work();
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace offload::test

#define CHECK_THAT(condition) offload::test::report((condition), #condition, __FILE__, __LINE__)
