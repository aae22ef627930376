// Executions on torch's tensors whose segments are given to devices one by one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "offload/segment_dispatcher.hpp"
#include "offload/ticket.hpp"
#include "run/call.hpp"
#include "run/held_storages.hpp"
#include "run/replay.hpp"
#include "run/surroundings.hpp"

namespace offload {

// A segment on a device. Without a replay the device does not have it.
struct DispatchSite {
  std::shared_ptr<Replay> replay;
  std::shared_ptr<const void> keep;  // the executable
  double cost_ns = 0;
  bool is_timed = false;  // its executions report durations
  // Draws the states of generators; null: no kernel reads one.
  std::function<std::vector<std::uint64_t>()> draw;
  bool has_buffers = false;  // closing releases some: a call must be bound under the GIL
};

// Where a memory's blocks lie.
struct DispatchMemory {
  c10::Device device = c10::kCPU;
  std::optional<c10::Stream> stream;  // to which the blocks belong; no value: the host's memory
  bool is_pinned = false;
};

// A Value that segments take or make.
struct DispatchValue {
  TensorLayout layout;
  std::size_t size_bytes = 0;
  bool is_returned = false;
  std::size_t group = 0;  // of adjacent Values; unused for the caller's
};

// One contiguous copy, from the first byte of one tensor to that of another.
struct CopyPiece {
  at::Tensor from;
  at::Tensor to;
  std::size_t size_bytes = 0;
};

class DispatchedExecution;

// Queues copies between two memories; returns the ticket of all. Throws the error that the caller
// receives.
using QueueCopies = std::function<std::shared_ptr<Ticket>(
    const DispatchedExecution& execution, std::int64_t producer, std::int64_t origin,
    std::int64_t target, const std::vector<std::int64_t>& values, std::vector<CopyPiece> pieces)>;

// All that is decided at load. Groups are numbered from 0.
struct DispatchSpec : DispatchPlan {
  std::vector<DispatchValue> values;
  std::vector<std::vector<std::int64_t>> groups;  // the Values of each, all of one segment
  std::vector<DispatchSite> sites;                // segment * n_devices + device
  std::vector<DispatchMemory> memories;
  std::vector<std::int64_t> given;  // by input of the Program: its Value; -1: no segment takes it
  QueueCopies copy;

  // Throws PlanError where lengths or numbers do not fit one another.
  void check() const;

  // Whether this thread is in a launch of one of the executables, which it would wait for.
  bool is_inside_launch() const;
};

// One execution on tensors.
class DispatchedExecution final : public DispatchedWork {
 public:
  // Allocates what the caller receives, and where all devices share one memory all that segments
  // make, on the present streams of this thread. `inputs`: of the Program, in order. `asked`: of
  // the submitting thread, by device. `refreshed`: tickets of weights that are copied again, by
  // memory.
  //
  // Errors: OutOfMemory if there is no room; PlanError where numbers of things do not fit.
  DispatchedExecution(std::shared_ptr<const DispatchSpec> spec,
                      const std::vector<at::Tensor>& inputs, std::vector<Surroundings> asked,
                      std::vector<std::vector<std::shared_ptr<Ticket>>> refreshed,
                      std::shared_ptr<const HeldStorages> pins, std::shared_ptr<Ticket> done);

  // The memory of a Value; undefined: it has none.
  at::Tensor& held(std::int64_t value, std::int64_t memory) {
    return held_[static_cast<std::size_t>(value) * spec_->memories.size() +
                 static_cast<std::size_t>(memory)];
  }

  void bind(std::int64_t segment, std::int64_t device) override;
  std::shared_ptr<Ticket> submit(std::int64_t segment, std::int64_t device) override;
  std::shared_ptr<Ticket> copy(std::int64_t producer, std::int64_t origin, std::int64_t target,
                               const std::vector<std::int64_t>& values) override;
  std::optional<Took> took(std::int64_t segment, std::int64_t device) const override;
  void release() noexcept override;

  std::shared_ptr<const void> context;  // for copies, until it is released

 private:
  const DispatchSite& site(std::int64_t segment, std::int64_t device) const {
    return spec_->sites[static_cast<std::size_t>(segment) * spec_->graph.n_devices +
                        static_cast<std::size_t>(device)];
  }
  std::size_t memory_of(std::int64_t device) const {
    return static_cast<std::size_t>(spec_->graph.memory_of[static_cast<std::size_t>(device)]);
  }
  // Gives Values adjacent memory. Throws OutOfMemory if there is no room.
  void allocate_block(const std::vector<std::int64_t>& values, std::int64_t memory);

  std::shared_ptr<const DispatchSpec> spec_;
  std::vector<Surroundings> asked_;                              // by device
  std::vector<std::vector<std::shared_ptr<Ticket>>> refreshed_;  // by memory
  std::vector<at::Tensor> held_;                                 // by value * n_memories + memory
  std::shared_ptr<const HeldStorages> pins_;
  std::shared_ptr<Call> bound_;  // until it is submitted
};

// The bytes of adjacent Values, each at a multiple of 512: the alignment of torch's CUDA allocator
// (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp).
std::size_t block_bytes(const DispatchSpec& spec, const std::vector<std::int64_t>& values);

}  // namespace offload
