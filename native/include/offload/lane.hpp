// Lanes: work that a thread of its own does in order.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "offload/ticket.hpp"

namespace offload {

struct LaneState;

// One worker thread with a queue. The thread starts with the first task, looks for work for a
// while after each (a hand-off to a looking thread takes a tenth of a microsecond, to a sleeping
// one ten), then sleeps.
//
// Owner: one executable. Thread: any may submit; tasks run one at a time in order of submission.
// Errors: a task's error goes to its ticket; submit after close throws std::logic_error. The
// destructor waits for what is queued and never throws; when the worker itself drops the last
// reference it detaches instead of waiting for itself. After a fork the child's lane is empty and
// usable; tickets of work that was queued fail there.
class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Queues a task; its ticket is finished after it. Without a ticket its error is lost; a task
  // whose ticket was cancelled by then is dropped. `hands_on`: a task that does not throw has seen
  // to it that somebody else finishes its ticket. A task that is refused is left with the caller.
  void submit(std::function<void()>&& task, std::shared_ptr<Ticket> ticket, bool hands_on = false);

  // Held while the executable executes, on whichever thread; a fork waits for it. Recursive, so
  // that a launch may fork.
  std::recursive_mutex& execution_mutex() noexcept;

  // Whether the calling thread is this lane's own, so that waiting for the lane would never end.
  bool is_current_thread() const;

  // Whether the calling thread is a lane's that tells of a ticket's end, and goes on afterwards.
  static bool calls_back() noexcept;

  // Whether the calling thread is the one that has to do the work of a ticket.
  static bool is_own_work(const Ticket& ticket) noexcept;

  // Whether no task is queued or running.
  bool idle() const;

  // Waits for what is queued, then ends the thread. Later submissions throw.
  void close() noexcept;

  // What to do around a wait inside fork, since a launch may need what the forking thread holds
  // (Python's GIL): `release` before it, `acquire` after it with what `release` returned.
  static void set_fork_hooks(void* (*release)(), void (*acquire)(void*)) noexcept;

  // Closes every lane of the process and ends the threads of every ThreadOwner, also of those that
  // are made afterwards: called once, before the interpreter goes away.
  static void close_all() noexcept;

 private:
  std::shared_ptr<LaneState> state_;
};

}  // namespace offload
