// The time spent waiting for torch's queue: torch_npu launches from a separate thread.
#pragma once

#include <cstdint>

namespace offload {

// The wait of a caller until torch had delivered its queue; both 0: it did not wait.
struct Drain {
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;

  std::uint64_t ns() const { return end_ns - begin_ns; }
};

}  // namespace offload
