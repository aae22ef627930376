// A thread of the process that calls objects at given times.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "offload/thread_owner.hpp"

namespace offload {

// What an alarm calls.
//
// Owner: the caller that sets the alarm. Thread: ring on the alarm's. Errors: none.
class Woken {
 public:
  virtual ~Woken() = default;
  virtual void ring() noexcept = 0;
};

// Calls objects at times if they still exist then.
//
// Owner: the process; never destroyed. Thread: any. Errors: none. If the system refuses a thread,
// or the interpreter exits, nothing is called. After a fork the child starts without calls.
class Alarm final : public ThreadOwner {
 public:
  static Alarm& instance();

  // Calls an object at a time of `now_ns`.
  void call_at(std::uint64_t at_ns, std::weak_ptr<Woken> woken) noexcept;

  void hold() noexcept override { mutex_.lock(); }
  void release() noexcept override { mutex_.unlock(); }
  void restart() noexcept override;
  void end() noexcept override;

 private:
  struct Call {
    std::uint64_t at_ns;
    std::weak_ptr<Woken> woken;
    bool operator<(const Call& other) const { return at_ns > other.at_ns; }  // earliest first
  };

  Alarm() = default;
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;  // a heap
  std::thread thread_;
  bool ended_ = false;
};

}  // namespace offload
