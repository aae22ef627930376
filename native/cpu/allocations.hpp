// Watching torch's CPU allocator.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

namespace offload {

// Counts the bytes that torch allocates on this thread while it lives.
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

// Sees every allocation of torch's CPU allocator, on all threads, between start and stop: the
// recorder asks it whether a tensor that it does not know was made during the call.
//
// Owner: a recording; at most one is active at a time (start throws std::logic_error otherwise).
// Thread: any; what it sees is behind a lock.
class AllocationObserver {
 public:
  ~AllocationObserver();
  void start();
  void stop() noexcept;

  // Whether this address was handed out since start.
  bool contains(std::uint64_t address) const;
  std::uint64_t bytes() const;

 private:
  bool active_ = false;
};

}  // namespace offload
