// The host sources of a resident graph's copies: pointer tables that kernels read.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "cuda/memory.hpp"

namespace offload::cuda {

// Pinned memory for the tables, twice. A copy that is under way reads its table when the device
// gets there, so a changed table is written to the other half, which the executions before the
// last change have read: those are waited for by an event, the latest are not.
//
// Owner: one resident. Thread: callers serialise, with a current context. Errors: the constructor
// and turn throw ExecutionError.
class HostTables {
 public:
  // `size_bytes` of each table; where it lies begins at multiples of 256 bytes.
  HostTables(const Driver& driver, const std::vector<std::size_t>& size_bytes);

  // Where a table lies in the current half.
  unsigned char* at(std::size_t table) const {
    return memory_.data() + half_ * half_bytes_ + offsets_[table];
  }

  // Goes to the other half, once nothing reads it any more; `last_stream` is where the current
  // half was last read, null if it was not.
  void turn(const Stream* last_stream);

 private:
  const Driver& driver_;
  std::vector<std::size_t> offsets_;
  std::size_t half_bytes_;
  PinnedMemory memory_;
  std::size_t half_ = 0;
  OrderEvent event_0_;
  OrderEvent event_1_;
  std::array<bool, 2> is_read_ = {false, false};  // an event says until when
};

}  // namespace offload::cuda
