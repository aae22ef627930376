// Tickets: the promise of the end of work that was submitted.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace offload {

// The state of one piece of work: it waits, has begun, was issued to a device that queues work, and
// has ended, or was cancelled before it began.
//
// Owner: shared by the caller, the worker, and those that wait for it. Thread: any; one ends it. No
// method needs the GIL, and those that wait must be called without it. Errors: wait rethrows the
// work's error at each call. In the child of a fork a ticket of the parent whose work had not ended
// has ended with an ExecutionError, since its worker does not exist there.
class Ticket {
 public:
  Ticket();
  ~Ticket() { notice_fork(); }  // destroying a condition that is waited for would block
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Whether the work has ended, with or without an error, or was cancelled.
  bool done() const noexcept;

  // Whether it has begun and not ended.
  bool running() const noexcept;

  // The error of work that has ended, or null. CancelledError if it was cancelled.
  std::exception_ptr error() const;

  // Blocks until it has ended; rethrows its error.
  void wait();

  // Blocks until it has ended, for at most `time`. Returns whether it has.
  bool wait_for(std::chrono::nanoseconds time);

  // Like wait_for, until it was issued or has ended.
  bool wait_for_issue(std::chrono::nanoseconds time);

  // Blocks until it has ended, ignoring its error. For a thread with nothing else to do: it spins
  // for a while before it sleeps.
  void await_end() noexcept;

  // Like await_end, until it was issued or has ended.
  void await_issue() noexcept;

  // Marks the work as begun. False: it was cancelled and must not begin.
  bool begin() noexcept;

  // Marks the work as delivered to a device completely and in order.
  void issue() noexcept;

  // Cancels it if it has not begun. Returns whether it is cancelled.
  bool cancel() noexcept;

  // Marks the work as ended, with its error if any, and runs the callbacks. Called once.
  void finish(std::exception_ptr error) noexcept;

  // The two halves of finish, for ending under a lock: `end` with it, then `call_back` without it.
  void end(std::exception_ptr error) noexcept;
  void call_back() noexcept;

  // Calls the function when the work has ended, on the thread that ends it, in the order of
  // registration; immediately if it has ended. The function must not throw.
  void when_done(std::function<void()> function);

  // The lane that does the work, to detect a thread that would wait for itself; null: no lane.
  void set_worker(const void* lane) noexcept { worker_ = lane; }
  const void* worker() const noexcept { return worker_; }

  // Called once in the child of each fork.
  static void note_fork() noexcept;

 private:
  enum class State : std::uint8_t { kWaiting, kRunning, kIssued, kDone };

  State state() const noexcept;
  void notice_fork() const noexcept;
  bool wait_for(State least, std::chrono::nanoseconds time);
  void await(State least) noexcept;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::atomic<State> state_ = State::kWaiting;  // changed under the mutex
  mutable std::exception_ptr error_;                    // set before the state says kDone
  std::vector<std::function<void()>> callbacks_;        // under the mutex
  std::atomic<const void*> worker_ = nullptr;
  mutable std::atomic<std::uint64_t> n_forks_;  // this process is the child of
};

}  // namespace offload
