#include "ascend/link_samples.hpp"

#include <array>
#include <cstring>

#include "ascend/pinned_memory.hpp"

namespace offload::acl {
namespace {

constexpr std::array<std::size_t, 4> kSizesBytes = {64 << 10, 1 << 20, 8 << 20, 32 << 20};
constexpr std::size_t kRounds = 9;  // after one that is not counted
constexpr double kNsInMs = 1e6;

}  // namespace

std::vector<std::pair<std::size_t, double>> sample_link(int index) {
  const Runtime& runtime = Runtime::get();
  const Device device(runtime, index);
  const ContextScope scope(runtime, device);
  const RelaxedCapture relaxed(runtime);
  constexpr std::size_t kMostBytes = kSizesBytes.back();
  const DeviceMemory memory(runtime, kMostBytes, "allocating memory to measure the link");
  const PinnedMemory store(runtime, kMostBytes);
  std::memset(store.data(), 1, kMostBytes);  // otherwise all pages are one
  const OwnStream stream(runtime, 0);
  const OrderEvent begin(runtime, kEventSync | kEventTimeline);
  const OrderEvent end(runtime, kEventSync | kEventTimeline);
  std::vector<std::pair<std::size_t, double>> samples;
  for (const std::size_t size_bytes : kSizesBytes) {
    for (std::size_t round = 0; round <= kRounds; ++round) {
      runtime.check(runtime.record_event(begin.handle(), stream.handle()), "measuring the link");
      const Error error = runtime.memcpy_async(memory.data(), size_bytes, store.data(), size_bytes,
                                               kHostToDevice, stream.handle());
      // Even after a failure the memory must not be freed during the copy.
      runtime.check(runtime.record_event(end.handle(), stream.handle()), "measuring the link");
      runtime.check(runtime.synchronize_event(end.handle()), "measuring the link");
      runtime.check(error, "copying to the device to measure the link");
      float milliseconds = 0;
      runtime.check(runtime.event_elapsed_time(&milliseconds, begin.handle(), end.handle()),
                    "measuring the link");
      if (round > 0) samples.emplace_back(size_bytes, static_cast<double>(milliseconds) * kNsInMs);
    }
  }
  return samples;
}

}  // namespace offload::acl
