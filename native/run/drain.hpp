// What waiting for a queue of torch's takes: torch_npu launches from a thread of its own.
#pragma once

#include <cstdint>

namespace offload {

// While a caller waited until torch had delivered what it queues; both 0: nobody asked.
struct Drain {
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;

  std::uint64_t ns() const { return end_ns - begin_ns; }
};

}  // namespace offload
