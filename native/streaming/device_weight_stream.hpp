// Weights of a program on a device, part of which each execution copies there.
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

// A device's stream of work, as its runtime identifies it.
using StreamAddress = void*;

// Contiguous bytes of the host store.
struct StoredBytes {
  const std::byte* from = nullptr;
  std::size_t size_bytes = 0;
};

// The copies of one transfer: from several places of the host store to one.
struct WeightCopy {
  std::vector<StoredBytes> runs;
  std::uint64_t to = 0;  // in the weight memory
  std::size_t size_bytes = 0;
};

// Hooks at the beginning of a pass while it is enqueued, to time it. All throw ExecutionError.
class PassMarks {
 public:
  virtual ~PassMarks() = default;

  // The lane has no work of the pass yet and does not follow `stream` yet.
  virtual void before_pass(StreamAddress stream) = 0;

  // Around each copy of a prologue, on the lane.
  virtual void before_copy(std::size_t transfer) = 0;
  virtual void behind_copy(std::size_t transfer) = 0;
};

// The weights of one executable: their memory on the device, the host store from which streamed
// weights are copied, and the lane, a separate stream on which the executable and its copies run.
//
// A pass is one execution. The last copies in the executable are the first transfers of the next
// pass (the wrap-around). They continue when the outputs are ready, and the caller's stream waits
// for an event in the executable, not for its end. The first pass, and passes after a failure or
// after weights were replaced, begin with a prologue that makes those transfers separately.
//
// The host store holds the streamed bytes, once for all executables (StoredWeights). Resident bytes
// are read through a small buffer. The memory that replaced a weight of which a part is streamed is
// released once it was read. Where copies can be moved, a pass that reads may move some: the holder
// of copies must set them to copies() before they run, and then call forget_moved.
//
// Each byte is written through the address at which launches read it, that of its weight. Bytes
// that two weights show at different addresses are therefore never used through both without an
// edge between, as the plan's order and that of the executable's copies have an edge for all that
// is overwritten.
//
// Owner: one resident (attach), and every tensor on the weight memory, which goes last. Thread:
// refresh, replace, mode, close, give_back and the counters from any; the rest as the resident is
// called. Nothing needs the GIL. Errors: the constructor throws PlanError for a plan that
// check_plan refuses, and BindingError for sources that do not fit.
//
// A derived class makes memory and store, calls set_memory, and calls close in its destructor.
class DeviceWeightStream {
 public:
  virtual ~DeviceWeightStream() = default;
  DeviceWeightStream(const DeviceWeightStream&) = delete;
  DeviceWeightStream& operator=(const DeviceWeightStream&) = delete;

  const StreamPlan& plan() const { return plan_; }

  // The device address of a weight. The content of a streamed weight is defined only for its
  // launches.
  std::uint64_t address(std::size_t weight) const { return addresses_[weight]; }

  // Reads all weights. `progress`, which may be empty, receives the bytes read so far; an exception
  // from it ends the load. Throws FileError naming the weight; ExecutionError after close, during
  // another load, after the first execution, or where the device fails.
  void load(const std::function<void(std::uint64_t)>& progress);

  // The bytes that load reads: those of every weight.
  std::uint64_t load_bytes() const noexcept;

  // As WeightContent, from the next pass on. If copies cannot move, replace also throws
  // ExecutionError for a weight whose bytes in the store another executable uses.
  void refresh(const std::vector<std::size_t>& weights) { content_.refresh(weights); }
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources);
  ReadMode mode(std::size_t weight) const { return content_.mode(weight); }

  // Gives the stream to a resident of `n_launches` launches, whose executable makes the transfers
  // of `for_next_pass` at its end: the prologue. Throws std::invalid_argument if the plan has
  // another number of launches, ExecutionError if the stream has a resident.
  void attach(std::size_t n_launches, std::vector<std::size_t> for_next_pass);

  // By transfer, in order. The number of runs and their sizes do not change.
  const std::vector<WeightCopy>& copies() const { return copies_; }

  // Whether copies have moved; forget_moved releases their former sources once all are set to
  // copies().
  bool has_moved() const noexcept { return stored_->has_moved(); }
  void forget_moved() {
    if (has_moved()) with_device([this] { stored_->forget_moved(); });
  }

  // Bytes of the host store that this executable uses, and the part of them that others use too; 0
  // once closed.
  std::optional<std::size_t> store_bytes() const { return stored_->size_bytes(); }
  std::optional<std::size_t> shared_store_bytes() const { return stored_->shared_bytes(); }

  // Prepares a pass before anything of it is enqueued: reads again what was refreshed or replaced,
  // once all earlier passes, including those on `stream`, have ended. Returns whether it read any.
  // Throws ExecutionError, after close too; the next pass tries again.
  bool begin_pass(StreamAddress stream);

  // Makes the lane wait for the work of `stream`, and makes the prologue's transfers if needed.
  // Until leave has succeeded the next pass needs a prologue. `marks` may be null. Returns whether
  // it made transfers. Throws ExecutionError.
  bool enter(StreamAddress stream, PassMarks* marks = nullptr);

  // Called once the executable was enqueued on the lane: makes `stream` wait until its outputs are
  // ready. Throws ExecutionError, after the lane has come to rest.
  void leave(StreamAddress stream);

  // For launches that are enqueued one by one, called before each: enqueues the transfers of which
  // it is the first reader. Throws ExecutionError.
  void issue_before(std::size_t launch, StreamAddress stream);

  // What the latest pass did, returned once; without times.
  PassReport take_report() noexcept;

  // After a failure, when enqueued work may not have been done: waits until the lane is idle, and
  // the next pass begins with the prologue. With the device's context.
  void distrust() noexcept {
    rest();
    holds_prologue_ = false;
  }

  // Waits until the lane is idle. With the device's context.
  virtual void rest() noexcept = 0;

  // Waits until nothing runs, and releases all but the weight memory, which tensors may still use.
  void close() noexcept;

  // Once closed: releases the weight memory. No tensor on it may be used any more.
  void give_back() noexcept;

  // Totals of enqueued transfers, including those of prologues.
  std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }
  std::uint64_t n_transfers() const noexcept { return n_transfers_; }

  // As WeightStream: no value, since only a timed pass measures waits; and memory of weights is
  // released on close alone.
  std::optional<std::uint64_t> wait_ns() const noexcept { return std::nullopt; }
  std::uint64_t discarded_bytes() const noexcept { return 0; }

  // Resets these totals, so that passes of a proof do not count. As the resident is called.
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

  // Sets where each weight begins (0: it has no bytes), and takes the streamed bytes from the
  // store. With the device's context.
  void set_memory(std::vector<std::uint64_t> addresses, const StoreOptions& store);

  // Releases the store. With the device's context; nothing may run.
  void release_store() noexcept {
    if (stored_) stored_->release();
  }

  // Calls `work` with the device's context, permitting calls that a capture of this thread refuses.
  virtual void with_device(const std::function<void()>& work) const = 0;

  // The following are called with the device's context. All throw ExecutionError.
  virtual std::unique_ptr<HostMemory> make_host_memory(std::size_t n_bytes) const = 0;
  virtual void copy_now(std::uint64_t to, const std::byte* from, std::size_t n_bytes) const = 0;
  virtual void enqueue_copy(std::uint64_t to, const StoredBytes& from,
                            StreamAddress stream) const = 0;
  virtual void wait_for(StreamAddress stream) const = 0;  // and for the lane
  virtual void follow(StreamAddress stream) = 0;          // makes the lane follow it
  virtual void wait_until_ready(StreamAddress stream) = 0;
  virtual StreamAddress lane_address() const = 0;

  // Enqueues the copies of one transfer.
  void enqueue_copies(const WeightCopy& copy, StreamAddress stream) const;

  // Releases streams and events. With the device's context; nothing runs.
  virtual void release_order() noexcept = 0;

  // Releases the weight memory, once nothing uses it. With the device's context.
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
  std::vector<std::vector<std::size_t>> first_transfers_;  // by launch: those it reads first
  std::vector<std::size_t> prologue_;
  std::uint64_t pass_transfer_bytes_ = 0;  // of each pass
  bool holds_prologue_ = false;            // whether the ring does
  bool lane_may_run_ = false;              // work was enqueued since the latest rest
  std::uint64_t pass_bytes_ = 0;

  std::atomic<std::uint64_t> bytes_moved_ = 0;
  std::atomic<std::uint64_t> n_transfers_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<bool> executed_ = false;  // at least one has begun
  std::mutex mutex_;                    // guards loading_ and give_back
  bool loading_ = false;
};

}  // namespace offload
