// The memory of weights on a CUDA device under a budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/memory.hpp"
#include "streaming/stream_plan.hpp"

namespace offload::cuda {

// Physical memory of the plan's bytes, rounded up once to the device's granularity. Weights in one
// piece share an address range. A weight in several pieces has a separate range in which they are
// mapped side by side, so that two weights may show the same bytes.
//
// A mapping begins where its handle does (cuMemMap: the offset "currently must be zero"). There is
// therefore a handle for each stretch of the memory between two places where a piece of a weight in
// several pieces begins or ends, and a piece shows whole stretches.
//
// Several addresses of one byte are coherent between device operations if one begins after the
// other has ended, and never within an operation (CUDA C++ Programming Guide, "Virtual Aliasing
// Support"). The user of the memory orders the operations.
//
// Owner: one stream of weights. Thread: any may read addresses. Errors: the constructor throws
// PlanError if the plan's granule does not fit the device, OutOfMemory and ExecutionError, and
// leaves nothing behind. The device must no longer use the memory when this is destroyed.
class CudaWeightMemory {
 public:
  // `plan` has passed check_plan.
  CudaWeightMemory(const Driver& driver, Device device, const StreamPlan& plan);
  CudaWeightMemory(const CudaWeightMemory&) = delete;
  CudaWeightMemory& operator=(const CudaWeightMemory&) = delete;

  // By weight, its address; 0: it has no bytes.
  const std::vector<std::uint64_t>& addresses() const { return addresses_; }

 private:
  struct Stretch {
    std::size_t begin;  // in the weight memory
    PhysicalMemory memory;
  };

  void make_stretches(const StreamPlan& plan, std::size_t unit_bytes);
  void map_whole_weights(const StreamPlan& plan);
  void map_pieces(const StreamPlan& plan, std::size_t unit_bytes);
  std::size_t stretch_of(std::size_t memory_offset_bytes) const;

  const Driver& driver_;
  Device device_;
  std::vector<std::uint64_t> addresses_;
  std::vector<Stretch> stretches_;    // by begin
  std::optional<AddressRange> base_;  // of weights in one piece
  std::vector<AddressRange> ranges_;  // one for each weight in several pieces
};

}  // namespace offload::cuda
