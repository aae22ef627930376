// Copies from the host to tables on the device.
#pragma once

#include <cstddef>
#include <vector>

#include "ascend/missing_bytes.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// Enqueues the copy of a range of a host image to the same place of device memory. The runtime
// keeps what it was given at the call. ExecutionError, which begins with `what`.
inline void copy_range(const Runtime& runtime, const DeviceMemory& memory,
                       const unsigned char* host, const MissingBytes& range, Stream stream,
                       const char* what) {
  runtime.check(runtime.memcpy_async(static_cast<unsigned char*>(memory.data()) + range.begin(),
                                     range.size_bytes(), host + range.begin(), range.size_bytes(),
                                     kHostToBufferToDevice, stream),
                what);
}

// Fills device memory, and waits. ExecutionError, which begins with `what`.
template <typename Item>
void upload(const Runtime& runtime, const DeviceMemory& memory, const std::vector<Item>& items,
            const char* what) {
  if (items.empty()) return;
  const std::size_t n_bytes = items.size() * sizeof(Item);
  runtime.check(
      runtime.memcpy(memory.data(), memory.size_bytes(), items.data(), n_bytes, kHostToDevice),
      what);
}

}  // namespace offload::acl
