#include "cpu/allocations.hpp"

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pthread.h>

#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_set>

namespace offload {

struct AllocationCount::Reporter final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t alloc_size, std::size_t, std::size_t,
                         c10::Device) override {
    if (alloc_size > 0) bytes += static_cast<std::uint64_t>(alloc_size);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::uint64_t bytes = 0;
};

struct AllocationCount::Guard {
  explicit Guard(std::shared_ptr<c10::DebugInfoBase> info)
      : guard(c10::DebugInfoKind::PROFILER_STATE, std::move(info)) {}
  // An active profiler would take our info for its own: its callbacks are disabled meanwhile.
  at::DisableRecordFunctionGuard no_callbacks;
  c10::DebugInfoGuard guard;
};

AllocationCount::AllocationCount()
    : reporter_(std::make_shared<Reporter>()), guard_(std::make_unique<Guard>(reporter_)) {}

AllocationCount::~AllocationCount() = default;

std::uint64_t AllocationCount::bytes() const { return reporter_->bytes; }

namespace {

// Wraps the real allocator while a recording is active.
class ObservingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    c10::DataPtr memory = real_->allocate(n);
    const std::lock_guard lock(mutex_);
    seen_.insert(reinterpret_cast<std::uint64_t>(memory.get()));
    bytes_ += n;
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    real_->copy_data(to, from, n);
  }

  void start() {
    const std::lock_guard lock(mutex_);
    if (active_) throw std::logic_error("another recording is active");
    seen_.clear();
    bytes_ = 0;
    active_ = true;
    thread_ = std::this_thread::get_id();
    if (c10::GetCPUAllocator() != this) real_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this);
  }

  // Another thread may still be inside allocate, so real_ stays set.
  void stop() noexcept {
    const std::lock_guard lock(mutex_);
    c10::SetCPUAllocator(real_);
    active_ = false;
  }

  // A fork finds no other thread inside. In the child, the recording of another thread would never
  // end.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  void after_fork_in_child() {
    if (active_ && thread_ != std::this_thread::get_id()) {
      c10::SetCPUAllocator(real_);
      active_ = false;
    }
    mutex_.unlock();
  }

  bool contains(std::uint64_t address) const {
    const std::lock_guard lock(mutex_);
    return seen_.count(address) != 0;
  }

  std::uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  c10::Allocator* real_ = nullptr;
  bool active_ = false;
  std::thread::id thread_;  // the starting thread
  mutable std::mutex mutex_;
  std::unordered_set<std::uint64_t> seen_;
  std::uint64_t bytes_ = 0;
};

ObservingAllocator& observing_allocator() {
  static auto* const instance = new ObservingAllocator;  // tensors may outlive static destruction
  return *instance;
}

// Before any lane is made: the handler registered last is called first. That of the lanes waits for
// executions, which allocate, and for the GIL, whose owner may allocate.
[[maybe_unused]] const int kForksWatched = pthread_atfork(
    [] { observing_allocator().before_fork(); }, [] { observing_allocator().after_fork(); },
    [] { observing_allocator().after_fork_in_child(); });

}  // namespace

AllocationObserver::~AllocationObserver() { stop(); }

void AllocationObserver::start() {
  observing_allocator().start();
  active_ = true;
}

void AllocationObserver::stop() noexcept {
  if (!active_) return;
  active_ = false;
  observing_allocator().stop();
}

bool AllocationObserver::contains(std::uint64_t address) const {
  return observing_allocator().contains(address);
}

std::uint64_t AllocationObserver::bytes() const { return observing_allocator().bytes(); }

}  // namespace offload
