// How many threads operators share their work among, on whichever thread they run.
#pragma once

namespace offload {

// While alive, operators on this thread share their work among so many threads; what other threads
// have is left alone, which at::set_num_threads would change for those that torch hears of later.
//
// Owner: a stack frame. Thread: the one that made it. Errors: none where `is_supported`.
class OperatorThreads {
 public:
  // 0: as many as they have already.
  explicit OperatorThreads(int n_threads);
  ~OperatorThreads();
  OperatorThreads(const OperatorThreads&) = delete;
  OperatorThreads& operator=(const OperatorThreads&) = delete;

  // Whether this torch shares work among threads of OpenMP's, which can be told so for one thread.
  static bool is_supported();

 private:
  int n_threads_;
  int n_before_;
  int n_library_before_ = 0;
};

}  // namespace offload
