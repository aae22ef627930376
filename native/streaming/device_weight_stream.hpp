// Weights of a program on a device of which a part is copied there in each execution.
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

#include "offload/pass_report.hpp"
#include "streaming/host_memory.hpp"
#include "streaming/stored_weights.hpp"
#include "streaming/stream_plan.hpp"
#include "streaming/weight_content.hpp"

namespace offload {

// A device's stream of work, as its runtime names it.
using StreamAddress = void*;

// Bytes that lie together in the host store.
struct StoredBytes {
  const std::byte* from = nullptr;
  std::size_t size_bytes = 0;
};

// What one transfer copies: what lies at several places of the host store to one.
struct WeightCopy {
  std::vector<StoredBytes> runs;
  std::uint64_t to = 0;  // in the weight memory
  std::size_t size_bytes = 0;
};

// What is told of the begin of a pass while it is enqueued, so that it can be timed. All throw
// ExecutionError.
class PassMarks {
 public:
  virtual ~PassMarks() = default;

  // Nothing of the pass is on the lane yet, which does not follow `stream` yet.
  virtual void before_pass(StreamAddress stream) = 0;

  // Around each copy of a prologue, on the lane.
  virtual void before_copy(std::size_t transfer) = 0;
  virtual void behind_copy(std::size_t transfer) = 0;
};

// The weights of one executable: their memory on the device, the host store that streamed ones are
// copied from, and the stream of its own, the lane, on which the executable and its copies run.
//
// A pass is one execution. The last copies that the executable makes are the first transfers of the
// next pass (the wrap-around), so they go on when the outputs are ready, and the caller's stream
// waits for an event in the executable, not for its end. The first pass, one after a failure and
// one after weights were replaced begin with a prologue that makes those transfers by themselves.
//
// The host store holds what is streamed, once for all executables (StoredWeights); what is resident
// is read by way of a small buffer. What memory replaced a weight of which some is streamed is let
// go once it was read. Where copies can be moved, a pass that reads may move some: whoever holds
// copies has to set them to copies() before they run, and then calls forget_moved.
//
// Each byte is written through the address by which launches read it: that of its weight. So bytes
// that two weights show at addresses of their own are never used through both without an edge
// between, as the plan's order and that of the executable's copies have one for all that is
// overwritten.
//
// Owner: one resident (attach), and every tensor on the weight memory, which goes last. Thread:
// refresh, replace, mode, close, give_back and the counters from any; the rest as the resident is
// called. Nothing needs the GIL. Errors: the constructor throws PlanError for a plan that
// check_plan refuses, and BindingError for sources that do not fit. Whoever derives makes memory
// and store, calls set_memory, and calls close in its destructor.
class DeviceWeightStream {
 public:
  virtual ~DeviceWeightStream() = default;
  DeviceWeightStream(const DeviceWeightStream&) = delete;
  DeviceWeightStream& operator=(const DeviceWeightStream&) = delete;

  const StreamPlan& plan() const { return plan_; }

  // Where a weight lies on the device. What streamed ones hold is defined for their launches alone.
  std::uint64_t address(std::size_t weight) const { return addresses_[weight]; }

  // Reads all weights. `progress`, which may be empty, gets the bytes read so far; what it throws
  // ends the load. Throws FileError naming the weight; ExecutionError after close, beside another
  // load, after the first execution, or where the device fails.
  void load(const std::function<void(std::uint64_t)>& progress);

  // What load reads: every weight.
  std::uint64_t load_bytes() const noexcept;

  // As WeightContent, from the next pass on. replace also throws ExecutionError where copies cannot
  // move, for a weight whose bytes in the store another executable uses.
  void refresh(const std::vector<std::size_t>& weights) { content_.refresh(weights); }
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources);
  ReadMode mode(std::size_t weight) const { return content_.mode(weight); }

  // Gives the stream to a resident of so many launches, whose executable makes the transfers of
  // `for_next_pass` at its end: the prologue. Throws std::invalid_argument for another number of
  // launches than the plan's, ExecutionError if the stream has a resident.
  void attach(std::size_t n_launches, std::vector<std::size_t> for_next_pass);

  // By transfer, in order. How many runs they have, and of how many bytes, stays.
  const std::vector<WeightCopy>& copies() const { return copies_; }

  // Whoever holds copies has set them to copies(): lets go of where they were read before.
  bool has_moved() const noexcept { return stored_->has_moved(); }
  void forget_moved() {
    if (has_moved()) with_device([this] { stored_->forget_moved(); });
  }

  // Bytes of the host store that this executable uses, and those of them that others use too; 0
  // once closed.
  std::optional<std::size_t> store_bytes() const { return stored_->size_bytes(); }
  std::optional<std::size_t> shared_store_bytes() const { return stored_->shared_bytes(); }

  // Begins a pass of which nothing is enqueued yet: reads again what was refreshed or replaced,
  // once all earlier passes, also those on `stream`, have ended. Whether it read any. Throws
  // ExecutionError, after close too; the next pass tries once more.
  bool begin_pass(StreamAddress stream);

  // Lets the lane wait for what `stream` holds, and brings the prologue where it is needed. Until
  // leave has succeeded the next pass needs one. `marks`, which may be null, are told. Whether it
  // brought any. Throws ExecutionError.
  bool enter(StreamAddress stream, PassMarks* marks = nullptr);

  // The executable was enqueued on the lane: lets `stream` wait until its outputs are ready. Throws
  // ExecutionError, once nothing runs any more.
  void leave(StreamAddress stream);

  // Where launches are enqueued one by one, before each: enqueues what it is the first to read.
  // Throws ExecutionError.
  void issue_before(std::size_t launch, StreamAddress stream);

  // What the latest pass did, once; it knows no times.
  PassReport take_report() noexcept;

  // What was enqueued may not have been done: waits until nothing of the lane runs, and the next
  // pass begins with the prologue. With the device's context.
  void distrust() noexcept {
    rest();
    holds_prologue_ = false;
  }

  // Waits until nothing of the lane runs. With the device's context.
  virtual void rest() noexcept = 0;

  // Waits until nothing runs, and gives back all but the weight memory, which tensors may be on.
  void close() noexcept;

  // Once closed: gives the weight memory back. Nobody may use a tensor on it any more.
  void give_back() noexcept;

  // Totals of transfers that were enqueued, those of prologues included.
  std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }
  std::uint64_t n_transfers() const noexcept { return n_transfers_; }

  // As WeightStream: none, only a pass that is timed tells how long launches waited; and memory of
  // weights is given back on close alone.
  std::optional<std::uint64_t> wait_ns() const noexcept { return std::nullopt; }
  std::uint64_t discarded_bytes() const noexcept { return 0; }

  // Begins these totals anew, so that passes of a proof do not count. As the resident is called.
  void forget_transfers() noexcept { bytes_moved_ = n_transfers_ = 0; }

  // How often weights were read, load included.
  std::uint64_t generation() const noexcept { return generation_; }

 protected:
  DeviceWeightStream(StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources);

  // How this device uses the store.
  struct StoreOptions {
    StoreDevice device;
    bool is_shared = true;
    bool copies_move = false;
  };

  // Where each weight begins, 0: it has no bytes. Takes what is streamed from the store. With the
  // device's context.
  void set_memory(std::vector<std::uint64_t> addresses, const StoreOptions& store);

  // Lets go of the store. With the device's context; nothing may run.
  void release_store() noexcept {
    if (stored_) stored_->release();
  }

  // Calls `work` with the device's context, and past a capture of this thread.
  virtual void with_device(const std::function<void()>& work) const = 0;

  // What follows is called with the device's context. All throw ExecutionError.
  virtual std::unique_ptr<HostMemory> make_host_memory(std::size_t n_bytes) const = 0;
  virtual void copy_now(std::uint64_t to, const std::byte* from, std::size_t n_bytes) const = 0;
  virtual void enqueue_copy(std::uint64_t to, const StoredBytes& from,
                            StreamAddress stream) const = 0;
  virtual void wait_for(StreamAddress stream) const = 0;  // and for the lane
  virtual void follow(StreamAddress stream) = 0;          // the lane does
  virtual void wait_until_ready(StreamAddress stream) = 0;
  virtual StreamAddress lane_address() const = 0;

  // Enqueues what one transfer copies.
  void enqueue_copies(const WeightCopy& copy, StreamAddress stream) const;

  // Gives back streams and events. With the device's context; nothing runs.
  virtual void release_order() noexcept = 0;

  // Gives the weight memory back, once nothing uses it. With the device's context.
  virtual void release_memory() noexcept = 0;

 private:
  void read(const std::function<void(std::uint64_t)>& progress, bool is_first);
  void read_weight(std::size_t weight, bool is_first, const HostMemory* staging, ReadBuffer& buffer,
                   const std::function<void(std::size_t)>& done);
  void read_resident(std::size_t weight, const WeightPiece& piece, const HostMemory* staging,
                     ReadBuffer& buffer, const std::function<void(std::size_t)>& done);
  void point_copies();
  std::size_t staging_bytes(const std::vector<bool>& stale) const;
  void enqueue(std::size_t transfer, StreamAddress stream);

  const StreamPlan plan_;
  WeightContent content_;
  std::vector<std::uint64_t> addresses_;  // by weight
  std::unique_ptr<StoredWeights> stored_;
  std::vector<WeightCopy> copies_;                         // by transfer
  std::vector<std::vector<std::size_t>> first_transfers_;  // by launch, that it is first to read
  std::vector<std::size_t> prologue_;
  std::uint64_t pass_transfer_bytes_ = 0;  // that each pass copies
  bool holds_prologue_ = false;            // the ring does
  bool lane_may_run_ = false;              // since the latest rest for launches outside of it
  std::uint64_t pass_bytes_ = 0;

  std::atomic<std::uint64_t> bytes_moved_ = 0;
  std::atomic<std::uint64_t> n_transfers_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<bool> executed_ = false;  // at least begun
  std::mutex mutex_;                    // of loading_, and of giving back
  bool loading_ = false;
};

}  // namespace offload
