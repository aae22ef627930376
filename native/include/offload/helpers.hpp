// Helpers: threads of the process that take part in executions of other threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "offload/thread_owner.hpp"

namespace offload {

// Work that helpers may take part in.
//
// Owner: the execution that offers it, and each helper while it helps. Thread: help on a helper's;
// abandon on the thread that forked. Errors: none; those of the work go to the thread that
// requested it.
class Helped {
 public:
  virtual ~Helped() = default;

  // Takes part in the work and returns once nothing of it is left. An offer may be taken up late;
  // then this is a no-op.
  virtual void help() noexcept = 0;

  // In the child of a fork, where no helper exists: ends the work that helpers had begun.
  virtual void abandon() noexcept = 0;
};

// The helpers of this process. A helper is started when an offer first needs it. After helping it
// spins for offers for a while, then sleeps. It is woken on another processor than the offering
// thread's, which continues there.
//
// Owner: the process; never destroyed. Thread: any. Errors: none. If the system refuses a thread
// there are fewer helpers, and none once the interpreter exits: the offering thread does the work
// that no helper takes up. After a fork the child starts its own helpers.
class Helpers final : public ThreadOwner {
 public:
  static Helpers& instance();

  // Whether at least `n` helpers are spinning for offers, so that none needs to be woken.
  bool are_looking(std::size_t n) const noexcept { return n_looking_.load() >= n; }

  // Lets up to `n` helpers take part, in any order with other offers.
  void offer(const std::shared_ptr<Helped>& work, std::size_t n) noexcept;

  // Withdraws the offers of this work that no helper has taken up.
  void withdraw(const Helped& work) noexcept;

  // Registers work that may be offered; it must be removed before it is destroyed. Not inside help.
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

  struct Helper;

  Helpers();
  ~Helpers() = delete;
  void start(std::size_t n);
  void wake(std::size_t n) noexcept;
  void run(Helper& helper);
  void look();
  void sleep(std::unique_lock<std::mutex>& lock, Helper& helper);
  std::shared_ptr<Helped> take();

  mutable std::mutex mutex_;
  std::vector<Offer> offers_;
  std::vector<Helped*> works_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::atomic<std::size_t> n_offered_ = 0;  // number of helpers on offer, read while spinning
  std::atomic<std::size_t> n_looking_ = 0;
  std::atomic<bool> ended_ = false;
};

// Pauses the processor for some nanoseconds, in favour of its sibling thread.
inline void rest() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace offload
