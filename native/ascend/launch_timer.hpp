// Durations of launches on an Ascend device, one by one.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "ascend/pinned_memory.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// The measurement of one launch.
struct LaunchTime {
  double time_ns = 0;          // between the events around it
  bool host_was_ahead = true;  // the device never waited for the host meanwhile
};

// Times launches on a stream, by an event before and an event after each. The stream must not be
// captured: events of a capture give no times (107028).
//
// A device faster than the host would wait for it between two events. So copies from the host delay
// the stream before each group of launches, while the group is enqueued. If the group began
// earlier, its times may contain such waits; they are marked, and the next group is delayed twice
// as long, up to a limit.
//
// Owner: one measurement. Thread: callers serialise. Errors: the constructor throws
// BackendUnavailable without the device or where the runtime has no timing events, OutOfMemory
// without memory for the copies; before, after and take throw ExecutionError where the runtime or
// the device fails.
class LaunchTimer {
 public:
  explicit LaunchTimer(int device);
  ~LaunchTimer();
  LaunchTimer(const LaunchTimer&) = delete;
  LaunchTimer& operator=(const LaunchTimer&) = delete;

  // Called around the work of one launch; work between launches is not counted. The stream stays
  // the same until `take`, and must live until then, or until `settle`.
  void before(Stream stream);
  void after(Stream stream);

  // The launches since the last call, in order, once the device has executed them.
  std::vector<LaunchTime> take();

  // Waits until no timed work is running, and discards the measurements.
  void settle() noexcept;

 private:
  void hold_back(Stream stream);
  void collect();
  const OrderEvent& event(std::size_t index);

  const Runtime& runtime_;
  Device device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<PinnedMemory> store_;
  std::vector<std::unique_ptr<OrderEvent>> events_;  // two for each launch of a group
  std::vector<LaunchTime> times_;
  std::optional<Stream> busy_;  // the stream on which work of the group was enqueued
  std::size_t n_in_group_ = 0;  // launches
  std::size_t n_copies_;
};

}  // namespace offload::acl
