// Operators of one thread each, on whichever thread they run.
#pragma once

namespace offload {

// While alive, operators on this thread share their work with no other; what other threads have is
// left alone, which at::set_num_threads would change for those that torch hears of later.
//
// Owner: a stack frame. Thread: the one that made it. Errors: none where `is_supported`.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

  // Whether this torch shares work among threads of OpenMP's, which can be told of one thread.
  static bool is_supported();

 private:
  int n_threads_;
  int n_library_threads_ = 0;
};

}  // namespace offload
