#include "ascend/pass_timer.hpp"

#include <cmath>
#include <cstdint>

namespace offload::acl {
namespace {

constexpr const char* kWhat = "timing an execution";
constexpr std::uint32_t kTimed = kEventSync | kEventTimeline;
constexpr double kNsInMs = 1e6;

}  // namespace

bool PassTimer::is_possible(const Runtime& runtime) {
  return makes_events(runtime, kTimed, "making an event that records the time");
}

PassTimer::PassTimer(const Runtime& runtime)
    : runtime_(runtime), begin_(runtime, kTimed), end_(runtime, kTimed) {}

void PassTimer::before(Stream stream) {
  runtime_.check(runtime_.record_event(begin_.handle(), stream), kWhat);
}

void PassTimer::behind(Stream stream) {
  runtime_.check(runtime_.record_event(end_.handle(), stream), kWhat);
}

void PassTimer::report(PassReport& report) const {
  runtime_.check(runtime_.synchronize_event(end_.handle()), kWhat);
  float milliseconds = 0;
  runtime_.check(runtime_.event_elapsed_time(&milliseconds, begin_.handle(), end_.handle()), kWhat);
  report.device_ns =
      static_cast<std::uint64_t>(std::llround(static_cast<double>(milliseconds) * kNsInMs));
}

}  // namespace offload::acl
