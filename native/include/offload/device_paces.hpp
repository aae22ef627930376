// The paces of devices: the measured durations of their segments over the expected ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace offload {

// The pace of each device, smoothed, and the number of executions under way.
//
// Owner: shared by the chooser of devices and the dispatcher of segments. Thread: one at a time
// observes and forgets; any reads, begins and ends. Nothing locks, so a fork finds it usable.
// Errors: none; the caller passes a device that exists.
class DevicePaces {
 public:
  explicit DevicePaces(const std::vector<double>& paces);

  std::size_t size() const { return n_devices_; }
  std::vector<double> values() const;
  // The same without an allocation where the vector has its size.
  void read(std::vector<double>& into) const;

  // Notes the duration of a segment. One observation counts as at most twice or half of the pace: a
  // thread that another process preempts for 10 ms is no device that became a hundred times slower.
  void observe(std::size_t device, double expected_ns, double took_ns);

  // The same where segments are given to devices one by one: a duration that differs by more than
  // 1.5 times sets the pace at once, by at most 4 times, so that the rest of its execution is moved
  // in time.
  void observe_at_once(std::size_t device, double expected_ns, double took_ns);

  // The paces of devices that an execution did not observe decay towards 1.
  void forget(const std::vector<bool>& observed);

  void begin_execution() { ++n_under_way_; }
  void end_execution() { --n_under_way_; }
  std::int64_t n_under_way() const { return n_under_way_; }
  // In the child of a fork, where executions of the parent have ended.
  void notice_fork() { n_under_way_ = 0; }

 private:
  double pace(std::size_t device) const { return paces_[device].load(std::memory_order_relaxed); }
  void set(std::size_t device, double pace) {
    paces_[device].store(pace, std::memory_order_relaxed);
  }

  std::size_t n_devices_;
  std::unique_ptr<std::atomic<double>[]> paces_;
  std::atomic<std::int64_t> n_under_way_ = 0;
};

}  // namespace offload
