#include "ascend/launch_timer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

constexpr const char* kWhat = "timing launches";
constexpr std::uint32_t kTimed = kEventSync | kEventTimeline;
constexpr double kNsInMs = 1e6;

// Launches per group, so that a group with its events and copies fits into a queue of 1024 tasks.
constexpr std::size_t kGroup = 64;

// 4 MiB take about 0.2 ms at 24 GB/s: a group is delayed by some 3 ms at first, by at most 50 ms.
constexpr std::size_t kCopyBytes = 4 << 20;
constexpr std::size_t kFewestCopies = 16;
constexpr std::size_t kMostCopies = 256;

}  // namespace

LaunchTimer::LaunchTimer(int device)
    : runtime_(Runtime::get()), device_(runtime_, device), n_copies_(kFewestCopies) {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  if (!makes_events(runtime_, kTimed, "making an event that records the time")) {
    throw BackendUnavailable("the runtime makes no events that record times (ACL_EVENT_TIME_LINE)");
  }
  memory_ = std::make_unique<DeviceMemory>(runtime_, kCopyBytes, "allocating memory to time with");
  try {
    store_ = std::make_unique<PinnedMemory>(runtime_, kCopyBytes);
  } catch (...) {
    memory_.reset();  // while the context is current
    throw;
  }
  std::memset(store_->data(), 1, kCopyBytes);  // otherwise all pages are one
}

LaunchTimer::~LaunchTimer() {
  settle();
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  events_.clear();
  store_.reset();
  memory_.reset();
}

void LaunchTimer::before(Stream stream) {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  if (n_in_group_ == kGroup) collect();
  if (n_in_group_ == 0) hold_back(stream);
  runtime_.check(runtime_.record_event(event(2 * n_in_group_).handle(), stream), kWhat);
}

void LaunchTimer::after(Stream stream) {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  runtime_.check(runtime_.record_event(event(2 * n_in_group_ + 1).handle(), stream), kWhat);
  ++n_in_group_;
}

std::vector<LaunchTime> LaunchTimer::take() {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  if (n_in_group_ > 0) collect();
  return std::exchange(times_, {});
}

void LaunchTimer::settle() noexcept {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  if (busy_) runtime_.synchronize_stream(*busy_);
  busy_.reset();
  n_in_group_ = 0;
  times_.clear();
}

void LaunchTimer::hold_back(Stream stream) {
  busy_ = stream;
  for (std::size_t copy = 0; copy < n_copies_; ++copy) {
    runtime_.check(runtime_.memcpy_async(memory_->data(), kCopyBytes, store_->data(), kCopyBytes,
                                         kHostToDevice, stream),
                   "holding back a stream whose launches are timed");
  }
}

void LaunchTimer::collect() {
  EventRecordedStatus begun = kEventRecordedNotReady;
  runtime_.check(runtime_.query_event(event(0).handle(), &begun), kWhat);
  const bool was_ahead = begun != kEventRecordedComplete;
  runtime_.check(runtime_.synchronize_event(event(2 * n_in_group_ - 1).handle()), kWhat);
  for (std::size_t launch = 0; launch < n_in_group_; ++launch) {
    float milliseconds = 0;
    runtime_.check(runtime_.event_elapsed_time(&milliseconds, event(2 * launch).handle(),
                                               event(2 * launch + 1).handle()),
                   kWhat);
    times_.push_back({static_cast<double>(milliseconds) * kNsInMs, was_ahead});
  }
  if (!was_ahead) n_copies_ = std::min(2 * n_copies_, kMostCopies);
  n_in_group_ = 0;
  busy_.reset();
}

const OrderEvent& LaunchTimer::event(std::size_t index) {
  while (events_.size() <= index) {
    events_.push_back(std::make_unique<OrderEvent>(runtime_, kTimed));
  }
  return *events_[index];
}

}  // namespace offload::acl
