// What launches take on an Ascend device, one by one.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "ascend/pinned_memory.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// What was measured of one launch.
struct LaunchTime {
  double time_ns = 0;          // between the event before it and the one behind it
  bool host_was_ahead = true;  // so that the device never waited for the host meanwhile
};

// Times launches on a stream, by an event before and an event behind each. Nothing may be captured
// there: events of a capture tell no times (107028).
//
// A device that is quicker than the host waits for it between two events. So copies from the host
// hold the stream back before each group of launches, while the group is enqueued. If the group had
// begun by then its times may contain such waits; they say so, and the next group is held back
// twice as long, up to a limit.
//
// Owner: one measurement. Thread: callers serialise. Errors: the constructor throws
// BackendUnavailable without the device or where the runtime makes no events that tell times,
// OutOfMemory without memory for the copies; before, after and take throw ExecutionError where the
// runtime or the device fails.
class LaunchTimer {
 public:
  explicit LaunchTimer(int device);
  ~LaunchTimer();
  LaunchTimer(const LaunchTimer&) = delete;
  LaunchTimer& operator=(const LaunchTimer&) = delete;

  // Around what is enqueued for one launch; what is enqueued between launches is not counted. The
  // stream stays the same until `take`, and must live until then, or until `settle`.
  void before(Stream stream);
  void after(Stream stream);

  // The launches since the last call, in order, once the device has done them.
  std::vector<LaunchTime> take();

  // Waits until nothing of what was timed runs, and forgets it.
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
  std::optional<Stream> busy_;  // where something of the group was enqueued
  std::size_t n_in_group_ = 0;  // launches
  std::size_t n_copies_;
};

}  // namespace offload::acl
