// The driver's memory, each kind held by one class: physical memory, addresses, pinned memory.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"
#include "streaming/host_memory.hpp"

namespace offload::cuda {

// The unit, in bytes, in which a device's physical memory is allocated and mapped.
std::size_t granularity_bytes(const Driver& driver, Device device);

inline std::size_t round_up(std::size_t n_bytes, std::size_t unit_bytes) {
  return (n_bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

// Physical memory of a device, without an address.
//
// Owner: movable. Thread: any. Errors: the constructor throws OutOfMemory and ExecutionError. Its
// bytes live on while they are mapped anywhere.
class PhysicalMemory {
 public:
  // `n_bytes`: a multiple of the granularity.
  PhysicalMemory(const Driver& driver, Device device, std::size_t n_bytes);
  ~PhysicalMemory();
  PhysicalMemory(PhysicalMemory&& other) noexcept
      : driver_(other.driver_),
        n_bytes_(other.n_bytes_),
        handle_(std::exchange(other.handle_, 0)) {}
  PhysicalMemory& operator=(PhysicalMemory&&) = delete;

  MemoryHandle handle() const { return handle_; }
  std::size_t size_bytes() const { return n_bytes_; }

 private:
  const Driver& driver_;
  std::size_t n_bytes_;
  MemoryHandle handle_ = 0;
};

// A reserved address range and its mappings. It must no longer be used when it is destroyed. It
// lies where few numbers look like an address, if the driver follows the hint.
//
// Owner: movable. Thread: callers serialise. Errors: all but the destructor throw ExecutionError.
class AddressRange {
 public:
  // `n_bytes`: a multiple of the granularity.
  AddressRange(const Driver& driver, std::size_t n_bytes);
  ~AddressRange();
  AddressRange(AddressRange&& other) noexcept
      : driver_(other.driver_),
        address_(std::exchange(other.address_, 0)),
        n_bytes_(std::exchange(other.n_bytes_, 0)),
        mapped_(std::move(other.mapped_)) {}
  AddressRange& operator=(AddressRange&&) = delete;

  DevicePointer address() const { return address_; }
  std::size_t size_bytes() const { return n_bytes_; }

  // Maps all of `memory` at an address of the range where nothing is mapped.
  void map(DevicePointer at, const PhysicalMemory& memory);

  // Permits the device to read and write what is mapped there.
  void allow_access(DevicePointer at, std::size_t n_bytes, Device device);

 private:
  const Driver& driver_;
  DevicePointer address_ = 0;
  std::size_t n_bytes_ = 0;
  std::vector<std::pair<DevicePointer, std::size_t>> mapped_;
};

// Host memory in whole pages, no more than requested, which the device reads by itself once it is
// registered with the driver.
//
// Owner: one object; needs a current context while it is made and destroyed, and the device must no
// longer use it then. Errors: the constructor throws ExecutionError, and leaves nothing behind.
// Zero bytes: no memory.
class RegisteredMemory final : public HostMemory {
 public:
  RegisteredMemory(const Driver& driver, std::size_t n_bytes);
  ~RegisteredMemory() override;

 private:
  const Driver& driver_;
  std::size_t n_bytes_;
};

// Host memory that the device can read while it executes.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError. Zero bytes: no memory.
class PinnedMemory {
 public:
  PinnedMemory(const Driver& driver, std::size_t n_bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(address_); }

 private:
  const Driver& driver_;
  void* address_ = nullptr;
};

}  // namespace offload::cuda
