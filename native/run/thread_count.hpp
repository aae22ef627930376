// How many threads operators share their work among, carried from one thread to another.
#pragma once

#include <ATen/Parallel.h>

namespace offload {

// Gives operators on this thread as many threads as they had where an execution was asked for, so
// that its results have the same bits here. torch tells a thread that once, and not of changes;
// what is set here also counts for threads that torch first hears of later.
inline void use_threads(int n_threads) {
  if (at::get_num_threads() != n_threads) at::set_num_threads(n_threads);
}

// Kernels and libraries ask OpenMP how many threads they have, and share work so: their results may
// differ in the last bit. Torch tells it once in each thread, when it is first asked; operators
// that go to a library at once do not ask (ATen/ParallelOpenMP.cpp, lazy_init_num_threads).
inline void take_threads() {
  thread_local const int n_threads = at::get_num_threads();
  static_cast<void>(n_threads);
}

}  // namespace offload
