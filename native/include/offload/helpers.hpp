// Helpers: threads of the process that take part in the executions of other threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "offload/thread_owner.hpp"

namespace offload {

// Work that helpers may take part in.
//
// Owner: whoever offers it, and each helper while it helps. Thread: help on a helper's; abandon on
// the thread that forked. Errors: none; those of the work go to whoever has it done.
class Helped {
 public:
  virtual ~Helped() = default;

  // Takes part in what is under way, and returns once nothing of it is left. An offer may be taken
  // up late: then nothing is to be done.
  virtual void help() noexcept = 0;

  // In the child of a fork, where no helper exists: ends what helpers had under way.
  virtual void abandon() noexcept = 0;
};

// The helpers of this process. None is started before there is an offer that asks for one; each
// looks for offers for a while after it has helped, then sleeps.
//
// Owner: the process; it is never destroyed. Thread: any. Errors: none; where the system has no
// thread left there are fewer helpers, and once the interpreter exits there are none: whoever
// offers does all that nobody takes up. After a fork the child starts helpers of its own.
class Helpers final : public ThreadOwner {
 public:
  static Helpers& instance();

  // Whether so many look for offers now: then nobody has to be woken.
  bool are_looking(std::size_t n) const noexcept { return n_looking_.load() >= n; }

  // Lets so many helpers take part, in any order with other offers.
  void offer(const std::shared_ptr<Helped>& work, std::size_t n) noexcept;

  // Takes back what nobody has taken up of the offers of this work.
  void withdraw(const Helped& work) noexcept;

  // Of work that may be offered; it must be removed before it goes. Not inside help.
  void add(Helped& work);
  void remove(Helped& work) noexcept;

  std::size_t n_started() const;

  void hold() noexcept override { mutex_.lock(); }
  void release() noexcept override { mutex_.unlock(); }
  void restart() noexcept override;
  void end() noexcept override;

 private:
  struct Offer {
    std::shared_ptr<Helped> work;
    std::size_t n_left;
  };

  Helpers() = default;
  void start(std::size_t n);
  void run();
  void look();
  std::shared_ptr<Helped> take();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;
  std::vector<Helped*> works_;
  std::vector<std::thread> threads_;
  std::atomic<std::size_t> n_offered_ = 0;  // to how many helpers, for those that look
  std::atomic<std::size_t> n_looking_ = 0;
  std::atomic<bool> ended_ = false;
};

// Lets the processor rest for some nanoseconds, and its sibling work meanwhile.
inline void rest() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace offload
