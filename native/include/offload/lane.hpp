// Lanes: work that a dedicated thread does in order.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "offload/ticket.hpp"

namespace offload {

struct LaneState;

// A worker thread with a queue. The thread starts with the first task. After each task it spins for
// work for a while (a hand-off to a spinning thread takes 0.1 us, to a sleeping one 10 us), then
// sleeps.
//
// Owner: one executable. Thread: any may submit; tasks run one at a time in order of submission.
// Errors: a task's error goes to its ticket; submit after close throws std::logic_error. The
// destructor waits for queued tasks and never throws; if the worker itself drops the last
// reference, it detaches instead of waiting for itself. After a fork the child's lane is empty and
// usable; tickets of queued work fail there.
class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Queues a task and finishes its ticket after it. Without a ticket its error is lost. A task
  // whose ticket has been cancelled by then is dropped. `hands_on`: unless it throws, the task
  // arranges for its ticket to be finished elsewhere. A task that is refused stays with the caller.
  void submit(std::function<void()>&& task, std::shared_ptr<Ticket> ticket, bool hands_on = false);

  // Held while the executable executes, on any thread; a fork waits for it. Recursive, so that a
  // launch may fork.
  std::recursive_mutex& execution_mutex() noexcept;

  // Whether the calling thread is this lane's worker, where waiting for the lane would deadlock.
  bool is_current_thread() const;

  // Whether the calling thread is running a ticket's callbacks (`CallingBack`).
  static bool calls_back() noexcept;

  // Whether the calling thread is the worker that must do a ticket's work.
  static bool is_own_work(const Ticket& ticket) noexcept;

  bool idle() const;

  // Waits for queued tasks, then ends the thread. Later submissions throw.
  void close() noexcept;

  // Hooks around a wait inside fork, since a launch may need what the forking thread holds
  // (Python's GIL): `release` before it, then `acquire` with the result of `release`.
  static void set_fork_hooks(void* (*release)(), void (*acquire)(void*)) noexcept;

  // Closes every lane of the process and ends the threads of every ThreadOwner, including those
  // made later. Called once, before the interpreter exits.
  static void close_all() noexcept;

  // Whether `close_all` has begun: who arranges work of many lanes takes no more of it.
  static bool all_closed() noexcept;

 private:
  std::shared_ptr<LaneState> state_;
};

}  // namespace offload
