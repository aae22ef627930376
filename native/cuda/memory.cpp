#include "cuda/memory.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload::cuda {
namespace {

// Preferred addresses: 2 TiB whose upper four bytes, 0x2d50 to 0x2f4f, are a number that sizes,
// strides and shifts rarely are. By default a driver begins at 0x302000000, as published dumps
// show, where two adjacent small numbers look like an address.
constexpr DevicePointer kFirstPlace = 0x2d50'0000'0000;
constexpr DevicePointer kPlaceBytes = DevicePointer{2} << 40;
constexpr int kAttempts = 4;

// Places are multiples of this: a driver follows no hint that is not a multiple of its granularity,
// in which devices, or their simulators, may differ.
constexpr DevicePointer kPlaceUnitBytes = DevicePointer{64} << 20;

// The next address to request, round robin, so that a freed address is not requested at once.
DevicePointer next_place(std::size_t n_bytes) {
  static std::atomic<DevicePointer> used{0};
  const DevicePointer taken_bytes = round_up(n_bytes, kPlaceUnitBytes);
  const DevicePointer begin = used.fetch_add(taken_bytes) % kPlaceBytes;
  return kFirstPlace + (begin + n_bytes > kPlaceBytes ? 0 : begin);
}

AllocationProperties properties_of(Device device) {
  AllocationProperties properties = {};
  properties.type = kPinnedOnDevice;
  properties.location = {kLocatedOnDevice, device};
  return properties;
}

}  // namespace

std::size_t granularity_bytes(const Driver& driver, Device device) {
  const AllocationProperties properties = properties_of(device);
  std::size_t n_bytes = 0;
  driver.check(driver.memory_get_granularity(&n_bytes, &properties, kGranularityMinimum),
               "asking for the granularity of memory");
  return n_bytes;
}

PhysicalMemory::PhysicalMemory(const Driver& driver, Device device, std::size_t n_bytes)
    : driver_(driver), n_bytes_(n_bytes) {
  const AllocationProperties properties = properties_of(device);
  driver_.check_memory(driver_.memory_create(&handle_, n_bytes, &properties, 0), n_bytes,
                       "allocating device memory");
}

PhysicalMemory::~PhysicalMemory() {
  if (handle_ != 0) driver_.memory_release(handle_);
}

AddressRange::AddressRange(const Driver& driver, std::size_t n_bytes)
    : driver_(driver), n_bytes_(n_bytes) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const DevicePointer wanted = next_place(n_bytes);
    // A hint: a driver may return other addresses, and some refuse a hint that they cannot follow.
    if (driver_.address_reserve(&address_, n_bytes, 0, wanted, 0) != kSuccess) break;
    if (address_ == wanted) return;
    driver_.address_free(address_, n_bytes);
  }
  address_ = 0;
  driver_.check_memory(driver_.address_reserve(&address_, n_bytes, 0, 0, 0), n_bytes,
                       "reserving device addresses");
}

AddressRange::~AddressRange() {
  for (const auto& [at, n_bytes] : mapped_) driver_.memory_unmap(at, n_bytes);
  if (n_bytes_ != 0) driver_.address_free(address_, n_bytes_);
}

void AddressRange::map(DevicePointer at, const PhysicalMemory& memory) {
  mapped_.emplace_back(at, memory.size_bytes());  // first, since it may fail
  const Result result = driver_.memory_map(at, memory.size_bytes(), 0, memory.handle(), 0);
  if (result == kSuccess) return;
  mapped_.pop_back();
  driver_.fail_memory(result, memory.size_bytes(), "mapping device memory");
}

void AddressRange::allow_access(DevicePointer at, std::size_t n_bytes, Device device) {
  const AccessDescription access = {{kLocatedOnDevice, device}, kReadAndWrite};
  driver_.check_memory(driver_.memory_set_access(at, n_bytes, &access, 1), n_bytes,
                       "giving the device access to its memory");
}

PinnedMemory::PinnedMemory(const Driver& driver, std::size_t n_bytes) : driver_(driver) {
  if (n_bytes == 0) return;
  const Result result = driver_.memory_host_allocate(&address_, n_bytes, kHostMemoryForAll);
  if (result == kSuccess) return;
  throw ExecutionError("allocating pinned host memory, " + std::to_string(n_bytes) +
                       " bytes: " + driver_.describe(result));
}

PinnedMemory::~PinnedMemory() {
  if (address_ != nullptr) driver_.memory_host_free(address_);
}

RegisteredMemory::RegisteredMemory(const Driver& driver, std::size_t n_bytes)
    : driver_(driver), n_bytes_(n_bytes) {
  if (n_bytes == 0) return;
  const std::string wanted = std::to_string(n_bytes) + " bytes of host memory";
  data_ = map_pages(n_bytes);
  if (data_ == nullptr)
    throw ExecutionError("there are no " + wanted + ": " + std::strerror(errno));
  const Result result =
      driver_.memory_host_register(data_, whole_pages(n_bytes), kHostMemoryForAll);
  if (result == kSuccess) return;
  munmap(data_, whole_pages(n_bytes));
  throw ExecutionError("registering " + wanted +
                       " with the driver, which keeps it from being swapped out: the system may "
                       "limit how much can be (ulimit -l, the control group): " +
                       driver_.describe(result));
}

RegisteredMemory::~RegisteredMemory() {
  if (data_ == nullptr) return;
  // Pages that the driver still holds must not be reused.
  if (driver_.memory_host_unregister(data_) != kSuccess) return;
  munmap(data_, whole_pages(n_bytes_));
}

}  // namespace offload::cuda
