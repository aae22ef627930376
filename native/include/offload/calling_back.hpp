// Threads that run the callbacks of tickets.
#pragma once

namespace offload {

// While it lives, the calling thread runs callbacks of tickets: `Lane::calls_back` is true there,
// and waits are refused, since the thread may have the work to do that they wait for.
//
// Owner: the scope that makes it. Thread: that of the scope.
class CallingBack {
 public:
  CallingBack() noexcept;
  ~CallingBack();
  CallingBack(const CallingBack&) = delete;
  CallingBack& operator=(const CallingBack&) = delete;

 private:
  bool before_;
};

}  // namespace offload
