// Memory: plain, host, virtual and physical; copies and fills.
#include <cstring>

#include "convert.hpp"
#include "driver.hpp"

namespace simulated_cuda {

using simulator::Copy;
using simulator::Fill;
using simulator::Side;
using simulator::Status;

Result memory_get_info(std::size_t* free, std::size_t* total) {
  return call("cuMemGetInfo", Needs::kContext, [&](simulator::Device& device) {
    require_given(free);
    require_given(total);
    *total = device.memory.limit_bytes();
    const std::size_t used = device.memory.physical_bytes() + device.graphs.executable_bytes();
    *free = used < *total ? *total - used : 0;
  });
}

Result memory_allocate(DevicePointer* address, std::size_t n_bytes) {
  return call("cuMemAlloc", Needs::kContext, [&](simulator::Device& device) {
    require_given(address);
    device.captures.require_safe();
    *address = device.memory.allocate(n_bytes);
  });
}

Result memory_free(DevicePointer address) {
  return call("cuMemFree", Needs::kContext, [&](simulator::Device& device) {
    if (address == 0) return;
    device.captures.require_safe();
    device.scheduler.run_all();
    device.memory.free(address);
  });
}

Result memory_host_allocate(void** address, std::size_t n_bytes, unsigned int) {
  return call("cuMemHostAlloc", Needs::kContext, [&](simulator::Device& device) {
    require_given(address);
    device.captures.require_safe();
    *address = reinterpret_cast<void*>(device.memory.allocate_host(n_bytes));
  });
}

Result memory_host_free(void* address) {
  return call("cuMemFreeHost", Needs::kContext, [&](simulator::Device& device) {
    device.captures.require_safe();
    device.scheduler.run_all();
    device.memory.free_host(reinterpret_cast<std::uint64_t>(address));
  });
}

Result memory_host_register(void* address, std::size_t n_bytes, unsigned int) {
  return call("cuMemHostRegister", Needs::kContext, [&](simulator::Device& device) {
    require_given(address);
    device.captures.require_safe();
    device.memory.register_host(reinterpret_cast<std::uint64_t>(address), n_bytes);
  });
}

Result memory_host_unregister(void* address) {
  return call("cuMemHostUnregister", Needs::kContext, [&](simulator::Device& device) {
    device.captures.require_safe();
    device.scheduler.run_all();
    device.memory.unregister_host(reinterpret_cast<std::uint64_t>(address));
  });
}

Result address_reserve(DevicePointer* address, std::size_t n_bytes, std::size_t alignment,
                       DevicePointer wanted, unsigned long long flags) {
  return call("cuMemAddressReserve", Needs::kDriver, [&](simulator::Device& device) {
    require_given(address);
    simulator::require(flags == 0, Status::kInvalidValue);
    *address = device.memory.reserve(n_bytes, alignment, wanted);
  });
}

Result address_free(DevicePointer address, std::size_t n_bytes) {
  return call("cuMemAddressFree", Needs::kDriver,
              [&](simulator::Device& device) { device.memory.unreserve(address, n_bytes); });
}

namespace {

void require_valid(const AllocationProperties* properties) {
  constexpr int kPinned = 1, kOnDevice = 1;
  require_given(properties);
  simulator::require(properties->type == kPinned && properties->location.type == kOnDevice,
                     Status::kInvalidValue);
  simulator::require(properties->location.id >= 0 && properties->location.id < driver().n_devices,
                     Status::kInvalidValue);
}

}  // namespace

Result memory_create(MemoryHandle* handle, std::size_t n_bytes,
                     const AllocationProperties* properties, unsigned long long flags) {
  return call("cuMemCreate", Needs::kDriver, [&](simulator::Device& device) {
    require_given(handle);
    require_valid(properties);
    simulator::require(flags == 0, Status::kInvalidValue);
    *handle = device.memory.create(n_bytes)->handle;
  });
}

Result memory_release(MemoryHandle handle) {
  return call("cuMemRelease", Needs::kDriver,
              [&](simulator::Device& device) { device.memory.release(handle); });
}

Result memory_map(DevicePointer address, std::size_t n_bytes, std::size_t offset_bytes,
                  MemoryHandle handle, unsigned long long flags) {
  return call("cuMemMap", Needs::kDriver, [&](simulator::Device& device) {
    simulator::require(flags == 0, Status::kInvalidValue);
    device.memory.map(address, n_bytes, offset_bytes, handle);
  });
}

Result memory_unmap(DevicePointer address, std::size_t n_bytes) {
  return call("cuMemUnmap", Needs::kDriver,
              [&](simulator::Device& device) { device.memory.unmap(address, n_bytes); });
}

Result memory_set_access(DevicePointer address, std::size_t n_bytes,
                         const AccessDescription* descriptions, std::size_t count) {
  constexpr int kNone = 0, kRead = 1, kReadAndWrite = 3, kOnDevice = 1;
  bool is_device = true;
  const Result result = call("cuMemSetAccess", Needs::kDriver, [&](simulator::Device& device) {
    require_given(descriptions);
    for (std::size_t index = 0; index < count; ++index) {
      const int flags = descriptions[index].flags;
      const auto& location = descriptions[index].location;
      simulator::require(flags == kNone || flags == kRead || flags == kReadAndWrite,
                         Status::kInvalidValue);
      simulator::require(location.type == kOnDevice, Status::kInvalidValue);
      is_device = location.id >= 0 && location.id < driver().n_devices;
      if (!is_device) return;
      device.memory.set_access(address, n_bytes, flags != kNone, flags == kReadAndWrite);
    }
  });
  return is_device ? result : kInvalidDevice;
}

Result memory_get_granularity(std::size_t* n_bytes, const AllocationProperties* properties, int) {
  return call("cuMemGetAllocationGranularity", Needs::kDriver, [&](simulator::Device& device) {
    require_given(n_bytes);
    require_valid(properties);
    *n_bytes = device.memory.granularity_bytes();
  });
}

namespace {

template <class Value>
void put(void* destination, Value value) {
  std::memcpy(destination, &value, sizeof(value));
}

void put_attribute(void* value, int attribute, const simulator::Allocation& found) {
  const bool on_host = found.kind == simulator::MemoryKind::kHost;
  switch (attribute) {
    case 1:
      return put(value, primary_context());
    case 2:
      return put(value, on_host ? kMemoryHost : kMemoryDevice);
    case 7:
      return put(value, static_cast<unsigned long long>(found.id));
    case 8:
      return put(value, 0U);  // not managed
    case 9:
      return put(value, 0);  // the device
    case 11:
      return put(value, found.begin);
    case 12:
      return put(value, found.n_bytes);
    case 13:
      return put(value, 1U);  // mapped
    default:
      throw simulator::DeviceError(Status::kInvalidValue);
  }
}

}  // namespace

Result pointer_get_attribute(void* value, int attribute, DevicePointer address) {
  constexpr int kDevicePointer = 3, kHostPointer = 4;
  return call("cuPointerGetAttribute", Needs::kContext, [&](simulator::Device& device) {
    require_given(value);
    const simulator::Allocation* const found = device.memory.find(address);
    simulator::require(found != nullptr, Status::kInvalidValue);
    if (attribute == kDevicePointer) return put(value, address);
    if (attribute != kHostPointer) return put_attribute(value, attribute, *found);
    simulator::require(found->kind == simulator::MemoryKind::kHost, Status::kInvalidValue);
    put(value, address);
  });
}

namespace {

Copy line(Side from, std::uint64_t source, Side to, std::uint64_t destination,
          std::size_t n_bytes) {
  Copy copy;
  copy.source.side = from;
  copy.source.address = source;
  copy.destination.side = to;
  copy.destination.address = destination;
  copy.width_bytes = n_bytes;
  copy.source.pitch_bytes = copy.destination.pitch_bytes = n_bytes;
  copy.source.height = copy.destination.height = 1;
  return copy;
}

std::uint64_t number(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

// Host memory that was not allocated here is not pinned: it is read at the call, and written before
// the call returns.
bool is_pageable(simulator::Device& device, std::uint64_t address) {
  return device.memory.find(address) == nullptr;
}

void copy_now(simulator::Device& device, const Copy& copy) {
  if (copy.width_bytes == 0) return;
  device.captures.require_default_usable();
  device.captures.require_safe();
  const auto stream = device.scheduler.get(0);
  device.submit(*stream, copy);
  device.scheduler.run(stream);
}

void copy_later(simulator::Device& device, Copy copy, Stream on) {
  const auto stream = device.scheduler.get(as_number(on));
  if (copy.width_bytes == 0) return;
  const bool captured = stream->capture != nullptr;
  if (!captured && copy.source.side == Side::kHost && is_pageable(device, copy.source.address)) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(copy.source.address);
    copy.staged.assign(bytes, bytes + copy.width_bytes);
  }
  const bool waits = !captured && copy.destination.side == Side::kHost &&
                     is_pageable(device, copy.destination.address);
  device.submit(*stream, std::move(copy));
  if (waits) device.scheduler.run(stream);
}

}  // namespace

Result copy_to_device(DevicePointer destination, const void* source, std::size_t n_bytes) {
  return call("cuMemcpyHtoD", Needs::kContext, [&](simulator::Device& device) {
    copy_now(device, line(Side::kHost, number(source), Side::kDevice, destination, n_bytes));
  });
}

Result copy_to_host(void* destination, DevicePointer source, std::size_t n_bytes) {
  return call("cuMemcpyDtoH", Needs::kContext, [&](simulator::Device& device) {
    copy_now(device, line(Side::kDevice, source, Side::kHost, number(destination), n_bytes));
  });
}

Result copy_to_device_async(DevicePointer destination, const void* source, std::size_t n_bytes,
                            Stream stream) {
  return call("cuMemcpyHtoDAsync", Needs::kContext, [&](simulator::Device& device) {
    copy_later(device, line(Side::kHost, number(source), Side::kDevice, destination, n_bytes),
               stream);
  });
}

Result copy_to_host_async(void* destination, DevicePointer source, std::size_t n_bytes,
                          Stream stream) {
  return call("cuMemcpyDtoHAsync", Needs::kContext, [&](simulator::Device& device) {
    copy_later(device, line(Side::kDevice, source, Side::kHost, number(destination), n_bytes),
               stream);
  });
}

Result copy_on_device_async(DevicePointer destination, DevicePointer source, std::size_t n_bytes,
                            Stream stream) {
  return call("cuMemcpyDtoDAsync", Needs::kContext, [&](simulator::Device& device) {
    copy_later(device, line(Side::kDevice, source, Side::kDevice, destination, n_bytes), stream);
  });
}

// For addresses on either side; where a test says so, host memory counts as the device's, and is
// used when the stream reaches the copy.
Result copy_async(DevicePointer destination, DevicePointer source, std::size_t n_bytes,
                  Stream stream) {
  return call("cuMemcpyAsync", Needs::kContext, [&](simulator::Device& device) {
    const auto side = [&device](std::uint64_t address) {
      const simulator::Allocation* const found = device.memory.find(address);
      const bool is_host = found == nullptr || found->kind == simulator::MemoryKind::kHost;
      return is_host ? Side::kHost : Side::kDevice;
    };
    const Copy copy = line(side(source), source, side(destination), destination, n_bytes);
    if (!driver().host_is_device) return copy_later(device, copy, stream);
    if (n_bytes != 0) device.submit(*device.scheduler.get(as_number(stream)), copy);
  });
}

Result copy_3d_async(const Memcpy3D* params, Stream stream) {
  return call("cuMemcpy3DAsync", Needs::kContext, [&](simulator::Device& device) {
    require_given(params);
    const Copy copy = to_copy(*params);
    if (copy.height == 1 && copy.depth == 1) return copy_later(device, copy, stream);
    device.submit(*device.scheduler.get(as_number(stream)), copy);
  });
}

namespace {

Result fill_later(const char* symbol, DevicePointer destination, unsigned int value,
                  unsigned int element_bytes, std::size_t count, Stream stream) {
  return call(symbol, Needs::kContext, [&](simulator::Device& device) {
    simulator::require(destination % element_bytes == 0, Status::kInvalidValue);
    Fill fill;
    fill.destination = destination;
    fill.value = value;
    fill.element_bytes = element_bytes;
    fill.width = count;
    const auto on = device.scheduler.get(as_number(stream));
    if (count != 0) device.submit(*on, fill);
  });
}

}  // namespace

Result memset_d8_async(DevicePointer destination, unsigned char value, std::size_t count,
                       Stream stream) {
  return fill_later("cuMemsetD8Async", destination, value, 1, count, stream);
}

Result memset_d16_async(DevicePointer destination, unsigned short value, std::size_t count,
                        Stream stream) {
  return fill_later("cuMemsetD16Async", destination, value, 2, count, stream);
}

Result memset_d32_async(DevicePointer destination, unsigned int value, std::size_t count,
                        Stream stream) {
  return fill_later("cuMemsetD32Async", destination, value, 4, count, stream);
}

Result stream_write_value_64(Stream stream, DevicePointer address, std::uint64_t value,
                             unsigned int flags) {
  return call("cuStreamWriteValue64", Needs::kContext, [&](simulator::Device& device) {
    simulator::require(address % 8 == 0 && flags == 0, Status::kInvalidValue);
    const auto on = device.scheduler.get(as_number(stream));
    for (unsigned int half = 0; half < 2; ++half) {
      Fill fill;
      fill.destination = address + 4 * half;
      fill.value = static_cast<unsigned int>(value >> (32 * half));
      fill.element_bytes = 4;
      fill.width = 1;
      device.submit(*on, fill);
    }
  });
}

}  // namespace simulated_cuda
