// Copies from the host to tables on the device.
#pragma once

#include <cstddef>
#include <vector>

#include "ascend/runtime.hpp"

namespace offload::acl {

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
