// The host sources of a resident graph's copies: pointer tables that kernels read.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "cuda/memory.hpp"

namespace offload::cuda {

// Pinned memory for the tables, double buffered. A copy reads its table when the device reaches it,
// so a changed table is written to the other half, which only executions before the last change
// have read. An event waits for those, not for the latest executions.
//
// Owner: one resident. Thread: callers serialise, with a current context. Errors: the constructor
// and turn throw ExecutionError.
class HostTables {
 public:
  // `size_bytes` of each table; tables begin at multiples of 256 bytes.
  HostTables(const Driver& driver, const std::vector<std::size_t>& size_bytes);

  // The address of a table in the current half.
  unsigned char* at(std::size_t table) const {
    return memory_.data() + half_ * half_bytes_ + offsets_[table];
  }

  // Switches to the other half, once nothing reads it; `last_stream` is the stream that last read
  // the current half, null if it was not read.
  void turn(const Stream* last_stream);

 private:
  const Driver& driver_;
  std::vector<std::size_t> offsets_;
  std::size_t half_bytes_;
  PinnedMemory memory_;
  std::size_t half_ = 0;
  OrderEvent event_0_;
  OrderEvent event_1_;
  std::array<bool, 2> is_read_ = {false, false};  // until the half's event
};

}  // namespace offload::cuda
