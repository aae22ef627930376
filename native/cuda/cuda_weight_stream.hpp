// Weights of a program on a CUDA device of which a part is copied there in each execution.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/memory.hpp"
#include "offload/pass_report.hpp"
#include "streaming/stream_plan.hpp"
#include "streaming/weight_source.hpp"

namespace offload::cuda {

// What one transfer copies.
struct WeightCopy {
  const std::byte* from = nullptr;  // in the host store
  DevicePointer to = 0;             // in the weight memory
  std::size_t size_bytes = 0;
};

// The weights of one executable: their memory on the device, the host store that streamed ones are
// copied from, and the stream of its own on which the graph and its copies run.
//
// A pass is one execution. The last copies of a pass's graph are the first transfers of the next
// pass (the wrap-around), so they go on when the outputs are ready, and the caller's stream waits
// for an event in the graph, not for its end. The first pass, one after a failure and one after
// weights were replaced begin with a prologue that makes those transfers by themselves.
//
// The host store holds streamed weights only, once, page by page; resident ones are read by way of
// a small buffer. What memory replaced a streamed weight is let go once it was read.
//
// Owner: one resident (attach), and every tensor on the weight memory, which goes last. Thread:
// refresh, replace, mode, close, give_back and the counters from any; the rest as the resident is
// called. Nothing needs the GIL. Errors: the constructor throws PlanError for a plan that
// check_plan refuses or with weights in several pieces, BindingError for sources that do not fit,
// BackendUnavailable without the device, ExecutionError without memory; nothing is left behind
// then.
class CudaWeightStream {
 public:
  CudaWeightStream(int device, StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources);
  ~CudaWeightStream();
  CudaWeightStream(const CudaWeightStream&) = delete;
  CudaWeightStream& operator=(const CudaWeightStream&) = delete;

  const StreamPlan& plan() const { return plan_; }

  // Where a weight lies on the device. What streamed ones hold is defined for their launches alone.
  DevicePointer address(std::size_t weight) const;

  // Reads all weights. `progress`, which may be empty, gets the bytes read so far; what it throws
  // ends the load. Throws FileError naming the weight; ExecutionError after close, beside another
  // load, after the first execution, or where the driver fails.
  void load(const std::function<void(std::uint64_t)>& progress);

  // What load reads: every weight.
  std::uint64_t load_bytes() const noexcept;

  // The bytes of these weights have changed in their sources, or files at their paths: the next
  // pass reads them again. Throws BindingError for a weight that does not exist, and ExecutionError
  // after close.
  void refresh(const std::vector<std::size_t>& weights);

  // From the next pass on these weights come from somewhere else. Throws BindingError for a weight
  // that does not exist or a source of another size, and ExecutionError after close; then none is
  // replaced.
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources);

  // How a weight's source is read. Throws BindingError for a weight that does not exist, and
  // ExecutionError after close.
  ReadMode mode(std::size_t weight) const;

  // Gives the stream to its resident. Throws ExecutionError if it has one.
  void attach();

  // By transfer, in order.
  const std::vector<WeightCopy>& copies() const { return copies_; }

  // The transfers that a pass's graph makes for the next pass: the prologue.
  void set_prologue(std::vector<std::size_t> transfers) { prologue_ = std::move(transfers); }

  // Recorded by each graph when its outputs are ready.
  Event ready() const { return ready_->handle(); }

  // Where graphs run.
  Stream lane() const { return lane_->handle(); }

  // What the last pass brought for the next one may not have come: waits until nothing of the lane
  // runs, and the next pass begins with the prologue. With a current context.
  void distrust() noexcept {
    rest();
    holds_prologue_ = false;
  }

  // Begins a pass of which nothing is enqueued yet: reads again what was refreshed or replaced,
  // once all earlier passes, also those on `stream`, have ended. Throws ExecutionError, after close
  // too; the next pass tries once more.
  void begin_pass(Stream stream);

  // Lets the lane wait for what `stream` holds, and brings the prologue where it is needed. Until
  // leave has succeeded the next pass needs one. Throws ExecutionError.
  void enter(Stream stream);

  // The graph was launched on the lane: lets `stream` wait until its outputs are ready. Throws
  // ExecutionError, once nothing runs any more.
  void leave(Stream stream);

  // Where launches are enqueued one by one, before each: enqueues what it is the first to read.
  // Throws ExecutionError.
  void issue_before(std::size_t launch, Stream stream);

  // What the latest pass did, once.
  PassReport take_report() noexcept;

  // Waits until nothing of the lane runs. With a current context.
  void rest() noexcept;

  // Waits until nothing runs, and gives back all but the weight memory, which tensors may be on.
  void close() noexcept;

  // Once closed: gives the weight memory back. Nobody may use a tensor on it any more.
  void give_back() noexcept;

  // Totals of transfers that were enqueued, those of prologues included.
  std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }
  std::uint64_t n_transfers() const noexcept { return n_transfers_; }

  // 0: nobody knows when the launches and the copies of a graph began.
  std::uint64_t wait_ns() const noexcept { return 0; }
  std::uint64_t busy_ns() const noexcept { return 0; }

  // How often weights were read, load included.
  std::uint64_t generation() const noexcept { return generation_; }

 private:
  struct Stale {
    std::vector<bool> weights;
    std::vector<std::pair<std::size_t, std::shared_ptr<WeightSource>>> replaced;
  };

  void make_memory();
  void make_copies();
  void let_go_of_driver() noexcept;
  Stale take_stale();
  void put_back(Stale stale);
  void read(Stale stale, const std::function<void(std::uint64_t)>& progress);
  std::size_t staging_bytes(const std::vector<bool>& stale) const;
  void read_weight(std::size_t weight, const RegisteredMemory& staging, ReadBuffer& buffer,
                   const std::function<void(std::size_t)>& done);
  void enqueue(std::size_t transfer, Stream stream);
  const Driver& driver_;
  PrimaryContext context_;
  const StreamPlan plan_;
  std::optional<PhysicalMemory> memory_;
  std::optional<AddressRange> addresses_;
  std::optional<RegisteredMemory> store_;
  std::optional<OwnStream> lane_;
  std::optional<OrderEvent> begin_;
  std::optional<OrderEvent> ready_;
  std::vector<WeightCopy> copies_;                         // by transfer
  std::vector<std::byte*> stored_;                         // by weight; null: resident
  std::vector<std::vector<std::size_t>> first_transfers_;  // by launch, that it is first to read
  std::vector<std::shared_ptr<WeightSource>> sources_;     // by weight; null: the store is it
  std::vector<std::size_t> prologue_;
  std::uint64_t graph_bytes_ = 0;  // that each pass copies
  bool holds_prologue_ = false;    // the ring does
  std::uint64_t pass_bytes_ = 0;

  std::atomic<std::uint64_t> bytes_moved_ = 0;
  std::atomic<std::uint64_t> n_transfers_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<bool> begin_anew_ = true;
  std::atomic<bool> executed_ = false;  // at least begun
  std::atomic<bool> closed_ = false;

  mutable std::mutex mutex_;  // of all below, and of sources_
  Stale stale_;
  bool attached_ = false;
  bool loading_ = false;
};

}  // namespace offload::cuda
