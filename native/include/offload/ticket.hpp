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
// Owner: shared by the caller, who does the work, and what waits for it. Thread: any; one ends it.
// No method needs the GIL, and those that wait must not be called with it. Errors: wait rethrows
// what the work threw, at each call. In the child of a fork a ticket of the parent whose work had
// not ended has ended with an ExecutionError, since the thread that would do it is not there.
class Ticket {
 public:
  Ticket();
  ~Ticket() { notice_fork(); }  // a condition that threads of the parent wait for never ends
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Whether the work has ended, well or not, or was cancelled.
  bool done() const noexcept;

  // Whether it has begun and not ended.
  bool running() const noexcept;

  // Of work that has ended: its error, or null. Cancelled: CancelledError.
  std::exception_ptr error() const;

  // Blocks until it has ended; rethrows its error.
  void wait();

  // Blocks until it has ended, and no longer than this; whether it has.
  bool wait_for(std::chrono::nanoseconds time);

  // As wait_for, until it was issued or has ended.
  bool wait_for_issue(std::chrono::nanoseconds time);

  // Blocks until it has ended, whatever the error: for a thread that has nothing else to do, which
  // looks for the end for a while before it sleeps.
  void await_end() noexcept;

  // As await_end, until it was issued or has ended.
  void await_issue() noexcept;

  // Says that the work begins. False: it was cancelled, and must not.
  bool begin() noexcept;

  // Says that a device has been given all of it, in order.
  void issue() noexcept;

  // Ends it as cancelled if it has not begun; whether it is cancelled.
  bool cancel() noexcept;

  // Says that it has ended, with the error if there was one, and calls back. Once.
  void finish(std::exception_ptr error) noexcept;

  // The two halves of finish, for who ends it under a lock: `end`, then without it `call_back`.
  void end(std::exception_ptr error) noexcept;
  void call_back() noexcept;

  // Has a function called when it has ended, by the thread that ends it, in the order of these
  // calls; here and now if it has ended. The function must not throw.
  void when_done(std::function<void()> function);

  // Which lane does the work, to find who would wait for himself; null: none.
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
  mutable std::atomic<std::uint64_t> n_forks_;  // of which this process is the child
};

}  // namespace offload
