#include "run/host_scheduler.hpp"

#include <memory>
#include <stdexcept>

#include "offload/errors.hpp"
#include "run/kernel_scope.hpp"
#include "run/thread_count.hpp"

namespace offload {

void HostScheduler::run(std::size_t launch) noexcept {
  if (error_) return;
  if (launches_ != nullptr) launches_->begin_ns[launch] = now_ns();
  try {
    const Executing executing;
    const KernelScope scope;
    use_threads(n_threads_);
    resident_.issue(launch);
  } catch (...) {
    error_ = std::current_exception();
  }
  if (launches_ != nullptr) {
    launches_->end_ns[launch] = now_ns();
    launches_->clock_reads += 2;
  }
}

void HostScheduler::execute(std::uint64_t& first_launch_ns, LaunchTimes* launches,
                            LaunchTimes* issues) {
  launches_ = launches;
  n_threads_ = at::get_num_threads();
  error_ = nullptr;
  first_launch_ns = now_ns();
  const std::size_t n_launches = resident_.n_launches();
  const auto last = std::make_shared<Ticket>();
  try {
    for (std::size_t launch = 0; launch < n_launches; ++launch) {
      if (issues != nullptr) issues->begin_ns[launch] = now_ns();
      device_.submit([this, launch] { run(launch); }, launch + 1 == n_launches ? last : nullptr);
      if (issues == nullptr) continue;
      issues->end_ns[launch] = now_ns();
      issues->clock_reads += 2;
    }
  } catch (const std::logic_error&) {
    device_.close();  // waits for delivered launches, which use the caller's memory
    throw ExecutionError("the executable is closed, or the interpreter is exiting");
  }
  if (n_launches > 0) last->wait();
  if (error_) std::rethrow_exception(error_);
}

}  // namespace offload
