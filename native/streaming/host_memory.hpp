// Memory of the host that a device copies from by itself.
#pragma once

#include <cstddef>

namespace offload {

// Begins on a page. What keeps it for the device gives it back.
//
// Owner: one object; nothing on the device may use it any more when it is destroyed. Errors: those
// of the constructors of devices' own kinds. No bytes: no memory.
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
