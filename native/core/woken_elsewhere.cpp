#include "core/woken_elsewhere.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace offload {

void WokenElsewhere::sleeps() noexcept {
  if (thread_ == 0) thread_ = static_cast<pid_t>(syscall(SYS_gettid));
  processor_ = sched_getcpu();
}

void WokenElsewhere::will_be_woken() noexcept {
  if (processor_ < 0 || processor_ != sched_getcpu()) return;
  if (sched_getaffinity(thread_, sizeof(allowed_), &allowed_) != 0) return;
  cpu_set_t others = allowed_;
  CPU_CLR(processor_, &others);
  if (CPU_COUNT(&others) == 0) return;
  is_excluded_ = sched_setaffinity(thread_, sizeof(others), &others) == 0;
}

void WokenElsewhere::is_awake() noexcept {
  if (!is_excluded_) return;
  is_excluded_ = false;
  sched_setaffinity(0, sizeof(allowed_), &allowed_);
}

}  // namespace offload
