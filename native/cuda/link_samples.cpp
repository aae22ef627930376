#include "cuda/link_samples.hpp"

#include <array>
#include <cstring>

#include "cuda/held.hpp"
#include "cuda/memory.hpp"

namespace offload::cuda {
namespace {

constexpr std::array<std::size_t, 4> kSizesBytes = {64 << 10, 1 << 20, 8 << 20, 32 << 20};
constexpr std::size_t kRounds = 9;  // after a first round that is not counted
constexpr double kNsInMs = 1e6;

}  // namespace

std::vector<std::pair<std::size_t, double>> sample_link(int device) {
  const Driver& driver = Driver::get();
  const PrimaryContext context(driver, device);
  const ContextScope scope(driver, context);
  const RelaxedCapture relaxed(driver);
  constexpr std::size_t kMostBytes = kSizesBytes.back();
  Held<DevicePointer> memory(driver.memory_free);
  driver.check_memory(driver.memory_allocate(memory.fill(), kMostBytes), kMostBytes,
                      "allocating memory to measure the link");
  const RegisteredMemory store(driver, kMostBytes);
  std::memset(store.data(), 1, kMostBytes);  // otherwise all pages are the same page
  const OwnStream stream(driver);
  Held<Event> begin(driver.event_destroy);
  Held<Event> end(driver.event_destroy);
  driver.check(driver.event_create(begin.fill(), kEventWithTimes), "making an event");
  driver.check(driver.event_create(end.fill(), kEventWithTimes), "making an event");
  std::vector<std::pair<std::size_t, double>> samples;
  for (const std::size_t size_bytes : kSizesBytes) {
    for (std::size_t round = 0; round <= kRounds; ++round) {
      driver.check(driver.event_record(begin.get(), stream.handle()), "measuring the link");
      const Result result =
          driver.copy_to_device_async(memory.get(), store.data(), size_bytes, stream.handle());
      // After a failure, too, no copy may run when the memory is released.
      driver.check(driver.event_record(end.get(), stream.handle()), "measuring the link");
      driver.check(driver.event_synchronize(end.get()), "measuring the link");
      driver.check(result, "copying to the device to measure the link");
      float milliseconds = 0;
      driver.check(driver.event_elapsed_time(&milliseconds, begin.get(), end.get()),
                   "measuring the link");
      if (round > 0) samples.emplace_back(size_bytes, static_cast<double>(milliseconds) * kNsInMs);
    }
  }
  return samples;
}

}  // namespace offload::cuda
