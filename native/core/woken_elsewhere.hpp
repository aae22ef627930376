// Waking a thread on another processor than that of the thread which wakes it.
#pragma once

#include <sched.h>
#include <sys/types.h>

namespace offload {

// The processors that a thread may use when it is woken by a thread that goes on computing.
//
// Linux may wake a thread on the processor where it slept although the thread that wakes it is
// running there and another processor is idle: above some use of the processors it does not look
// for an idle one (select_idle_cpu in kernel/sched/fair.c, SIS_UTIL). The two then take turns on
// one processor until the load balancer moves one, which takes longer than most executions, and
// again at the next wake-up. So the waking thread excludes its own processor, and the woken thread,
// by then on another, ends the exclusion. No-ops where the thread may use no other processor, and
// where the system refuses.
//
// Owner: whoever owns the thread. Thread: one at a time; `sleeps` and `is_awake` on the thread
// itself, `will_be_woken` on the thread that wakes it. Errors: none.
class WokenElsewhere {
 public:
  // Before the thread sleeps.
  void sleeps() noexcept;

  // Before the sleeping thread is notified.
  void will_be_woken() noexcept;

  // Once the thread is awake. It may use the same processors again as before it slept.
  void is_awake() noexcept;

 private:
  pid_t thread_ = 0;
  int processor_ = -1;  // where it slept
  bool is_excluded_ = false;
  cpu_set_t allowed_{};  // before the exclusion
};

}  // namespace offload
