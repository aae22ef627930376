#include "run/operator_threads.hpp"

#include <ATen/Parallel.h>

// Functions of the OpenMP that torch itself uses, and of MKL if torch has it. Both are found among
// torch's libraries when this module is loaded, or are null.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {
void omp_set_num_threads(int n_threads) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int n_threads) __attribute__((weak));
}
// NOLINTEND(readability-identifier-naming)

namespace offload {

bool OperatorThreads::is_supported() {
  return omp_set_num_threads != nullptr &&
         at::get_parallel_info().find("ATen parallel backend: OpenMP") != std::string::npos;
}

// Torch passes its setting to a thread when it is first asked there, and not later
// (ATen/ParallelOpenMP.cpp, lazy_init_num_threads). MKL is set separately; 0 selects OpenMP's
// number.
OperatorThreads::OperatorThreads(int n_threads)
    : n_threads_(n_threads), n_before_(n_threads == 0 ? 0 : at::get_num_threads()) {
  if (n_threads_ == 0) return;
  if (n_before_ != n_threads_ && omp_set_num_threads != nullptr) omp_set_num_threads(n_threads_);
  if (MKL_Set_Num_Threads_Local != nullptr) {
    n_library_before_ = MKL_Set_Num_Threads_Local(n_threads_);
  }
}

OperatorThreads::~OperatorThreads() {
  if (n_threads_ == 0) return;
  if (n_before_ != n_threads_ && omp_set_num_threads != nullptr) omp_set_num_threads(n_before_);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(n_library_before_);
}

}  // namespace offload
