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

}  // namespace offload
