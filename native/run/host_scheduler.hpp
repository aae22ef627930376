// Host scheduling: the baseline with which model offload is compared.
#pragma once

#include <cstdint>
#include <exception>

#include "offload/lane.hpp"
#include "offload/resident.hpp"

namespace offload {

// Delivers a resident program launch by launch to a lane that stands for the device, while that
// lane runs earlier launches: the two modes differ only in scheduling.
//
// Owner: one Replay, made after its lane (a fork holds lanes in the order in which they were made).
// Thread: one execution at a time. Errors: execute throws the first error of a launch; launches
// delivered after it do not run.
class HostScheduler {
 public:
  explicit HostScheduler(Resident& resident) : resident_(resident) {}

  // Runs all launches, and sets the time at which the host begins to deliver the first launch. With
  // `launches` and `issues` (both or neither) also when each ran, and when it was delivered.
  void execute(std::uint64_t& first_launch_ns, LaunchTimes* launches, LaunchTimes* issues);

  bool is_device_thread() const { return device_.is_current_thread(); }

  void close() noexcept { device_.close(); }

 private:
  void run(std::size_t launch) noexcept;

  Resident& resident_;
  LaunchTimes* launches_ = nullptr;
  int n_threads_ = 1;         // of operators, at the caller of the current execution
  std::exception_ptr error_;  // of the first launch that failed
  Lane device_;               // last, so that its thread ends before what it uses
};

}  // namespace offload
