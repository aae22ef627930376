// Host memory from which a device copies by itself.
#pragma once

#include <cstddef>

namespace offload {

// Page-aligned. The derived class registers it with the device and releases it.
//
// Owner: one object; the device may no longer use it at destruction. Errors: those of the
// constructors of each device's class. Zero bytes: no memory.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::byte* data() const { return data_; }

 protected:
  HostMemory() = default;

  std::byte* data_ = nullptr;
};

}  // namespace offload
