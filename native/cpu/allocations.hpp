// Observation of torch's CPU allocator.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

namespace offload {

// Counts the bytes that torch allocates on this thread during its life.
//
// Owner: a stack frame. Thread: the one that made it.
class AllocationCount {
 public:
  AllocationCount();
  ~AllocationCount();
  AllocationCount(const AllocationCount&) = delete;
  AllocationCount& operator=(const AllocationCount&) = delete;

  std::uint64_t bytes() const;

 private:
  struct Reporter;
  struct Guard;
  std::shared_ptr<Reporter> reporter_;
  std::unique_ptr<Guard> guard_;
};

// Observes every allocation of torch's CPU allocator, on all threads, between start and stop: the
// recorder asks it whether an unknown tensor was made during the call.
//
// Owner: a recording; at most one is active at a time (start throws std::logic_error otherwise).
// Thread: any; its records are guarded by a lock.
class AllocationObserver {
 public:
  ~AllocationObserver();
  void start();
  void stop() noexcept;

  // Whether this address was allocated since start.
  bool contains(std::uint64_t address) const;
  std::uint64_t bytes() const;

 private:
  bool active_ = false;
};

}  // namespace offload
