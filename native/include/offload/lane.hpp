// Lanes: work that a dedicated thread does in order.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

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

  // Held while the executable executes (`ExecutionLock`), on any thread; a fork waits for it.
  // Recursive, so that a launch may fork.
  std::recursive_mutex& execution_mutex() noexcept;

  // Whether the calling thread is this lane's worker, where waiting for the lane would deadlock.
  bool is_current_thread() const;

  // Whether the calling thread is running a ticket's callbacks (`CallingBack`).
  static bool calls_back() noexcept;

  // Whether the calling thread is the worker that must do a ticket's work.
  static bool is_own_work(const Ticket& ticket) noexcept;

  // Throws an ExecutionError in a launch that waits for a ticket whose work follows a launch that
  // forks: the fork waits for the former launch. May be called again and again during the wait.
  static void refuse_wait_beside_fork(const Ticket& ticket);

  bool idle() const;

  // Waits for queued tasks, then ends the thread. Later submissions throw.
  void close() noexcept;

  // Hooks around a wait inside fork, since a launch may need what the forking thread holds
  // (Python's GIL): `release` before it, then `acquire` with the result of `release`.
  static void set_fork_hooks(void* (*release)(), void (*acquire)(void*)) noexcept;

  // Waits until everything is at rest, and keeps it so until this thread has forked, or
  // `release_after_fork`; for Python 3.13 and later. A fork waits itself, but these then hold the
  // lock of all threads' states (PyOS_BeforeFork of Modules/posixmodule.c), for which threads with
  // the GIL wait, so that the fork must not wait for the GIL. If no fork begins for a while,
  // nothing is kept: Python may be in another handler, which waits for a thread that executes.
  static void hold_for_fork();
  static void release_after_fork() noexcept;

  // In the child of a fork: drops the work that was queued, which is kept until then.
  static void drop_abandoned() noexcept;

  // Closes every lane of the process and ends the threads of every ThreadOwner, including those
  // made later. Called once, before the interpreter exits.
  static void close_all() noexcept;

  // Whether `close_all` has begun: who arranges work of many lanes takes no more of it.
  static bool all_closed() noexcept;

 private:
  friend class ExecutionLock;

  std::shared_ptr<LaneState> state_;
};

// Marks its thread as one that carries out launches of an execution, whose end a fork waits for.
class Executing {
 public:
  Executing() noexcept;
  ~Executing();
  Executing(const Executing&) = delete;
  Executing& operator=(const Executing&) = delete;
};

// An execution of a lane's executable on this thread, holding the lane's execution mutex.
//
// Owner: the executing thread, which keeps the lane. Errors: an ExecutionError in a launch, where a
// launch of the wanted executable forks: the fork waits for the former launch, which would wait for
// the latter.
class ExecutionLock {
 public:
  explicit ExecutionLock(const Lane& lane);
  ~ExecutionLock();
  ExecutionLock(const ExecutionLock&) = delete;
  ExecutionLock& operator=(const ExecutionLock&) = delete;

  // Whether another execution had to end first.
  bool waited() const noexcept { return waited_; }

 private:
  LaneState& state_;
  std::thread::id before_;  // this thread, if it held the mutex already
  bool waited_ = false;
  const Executing executing_;
};

}  // namespace offload
