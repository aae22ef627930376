// The number of threads of operators, carried from one thread to another.
#pragma once

#include <ATen/Parallel.h>

namespace offload {

// Sets the number of threads of operators on this thread to that of the thread that requested the
// execution, so that results have the same bits. torch passes its setting to a thread once, without
// later changes; the number set here also applies to threads that torch first sees later.
inline void use_threads(int n_threads) {
  if (at::get_num_threads() != n_threads) at::set_num_threads(n_threads);
}

// Kernels and libraries divide their work by OpenMP's number of threads, so their results may
// differ in the last bit. Torch sets it once in each thread, when it is first asked; operators that
// call a library directly do not ask (ATen/ParallelOpenMP.cpp, lazy_init_num_threads).
inline void take_threads() {
  thread_local const int n_threads = at::get_num_threads();
  static_cast<void>(n_threads);
}

}  // namespace offload
