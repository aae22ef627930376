// The number of threads among which operators share their work, on any thread.
#pragma once

namespace offload {

// While it lives, operators on this thread share their work among `n_threads` threads. Other
// threads are unaffected, unlike with at::set_num_threads, which changes threads that torch first
// sees later.
//
// Owner: a stack frame. Thread: the one that made it. Errors: none where `is_supported`.
class OperatorThreads {
 public:
  // 0: unchanged.
  explicit OperatorThreads(int n_threads);
  ~OperatorThreads();
  OperatorThreads(const OperatorThreads&) = delete;
  OperatorThreads& operator=(const OperatorThreads&) = delete;

  // Whether this torch uses OpenMP threads, whose number can be set for a single thread.
  static bool is_supported();

 private:
  int n_threads_;
  int n_before_;
  int n_library_before_ = 0;
};

}  // namespace offload
