// Divides kernels' work among torch's threads by OpenMP, whose functions are those of the library
// that torch has loaded. Without -fopenmp there is one thread.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace offload::kernels {

// Multiply-adds from which threads pay: some 5 to 10 microseconds of work, against less than one
// for a fork and join if the threads are awake. torch's operators use threads from 32,768 elements
// (at::internal::GRAIN_SIZE).
inline constexpr long kSharedWork = 1 << 20;

// Threads that the caller may use now, as set by torch.set_num_threads.
inline int n_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

// Calls one(index) for each of n_items. `work` counts their multiply-adds together.
template <long n_items, long work, class One>
[[gnu::always_inline]] inline void for_each(const One& one) {
#ifdef _OPENMP
  if constexpr (n_items > 1 && work >= kSharedWork) {
    const long available = n_threads();
    if (available > 1) {
      const int used = static_cast<int>(available < n_items ? available : n_items);
#pragma omp parallel for schedule(static) num_threads(used)
      for (long index = 0; index < n_items; ++index) one(index);
      return;
    }
  }
#endif
  for (long index = 0; index < n_items; ++index) one(index);
}

}  // namespace offload::kernels
