// Weights of a program on an Ascend device, of which each execution copies a part there.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ascend/pass_timer.hpp"
#include "ascend/runtime.hpp"
#include "offload/resident.hpp"
#include "streaming/device_weight_stream.hpp"

namespace offload::acl {

// The weight memory is the caller's, the store is pinned, and the executable is a model that
// records an external event when its outputs are ready. Where the runtime makes no such events the
// caller's stream waits for the end of the model, its last copies included.
//
// The lane is one stream besides those of the model.
//
// Owner, thread, errors: as DeviceWeightStream. The constructor throws BackendUnavailable without
// the device, PlanError for weights in several pieces, ExecutionError without host memory or
// streams; nothing is left behind then.
class AscendWeightStream final : public DeviceWeightStream, public WeightPasses {
 public:
  // `memory`: of the plan's bytes, on the device. `release` frees it, once, on the closing thread.
  // `shares_store`: streamed bytes may be shared with other executables.
  AscendWeightStream(int device, StreamPlan plan,
                     std::vector<std::shared_ptr<WeightSource>> sources, std::uint64_t memory,
                     std::function<void()> release, bool shares_store);
  ~AscendWeightStream() override;

  int device() const { return device_.index(); }

  // The part of the host store that belongs to a device.
  static StoreDevice store_device(int device) { return {&Runtime::get(), device}; }

  // Adds a transfer to a stream of a model that is being made. Throws ExecutionError.
  void capture_copy(std::size_t transfer, Stream stream) const {
    enqueue_copies(copies()[transfer], stream);
  }

  // Recorded by the model when its outputs are ready, and reset by its waiter; null where the
  // runtime has no external events.
  Event ready() const { return ready_ ? ready_->handle() : nullptr; }

  // Joins the capture of a model, and runs its executions.
  Stream lane() const { return lane_->handle(); }

  // Executes the model whose copies transfer these weights on the lane, after the work on `stream`,
  // which then waits for the outputs. A prologue is a substage of submit. Throws ExecutionError.
  void execute(Model model, Stream stream, Submission& submission);

  // Whether later passes are timed, where the runtime has events for that. Throws ExecutionError.
  void trace_weights(bool traces) override;

  // The report of the latest pass, once; for a timed pass with its duration, for which this waits.
  // A failed wait is remembered. Throws ExecutionError.
  PassReport take_pass() override;

  // Whether timing has failed since the last query.
  bool take_failure() { return std::exchange(timing_failed_, false); }

  void rest() noexcept override;

 private:
  void with_device(const std::function<void()>& work) const override;
  std::unique_ptr<HostMemory> make_host_memory(std::size_t n_bytes) const override;
  void copy_now(std::uint64_t to, const std::byte* from, std::size_t n_bytes) const override;
  void enqueue_copy(std::uint64_t to, const StoredBytes& from, StreamAddress stream) const override;
  void wait_for(StreamAddress stream) const override;
  void follow(StreamAddress stream) override;
  void wait_until_ready(StreamAddress stream) override;
  StreamAddress lane_address() const override { return lane_->handle(); }
  void release_order() noexcept override;
  void release_memory() noexcept override;
  void make_order();
  void forget_ready(Stream stream);

  const Runtime& runtime_;
  Device device_;
  std::function<void()> release_;
  std::optional<OwnStream> lane_;
  std::optional<CountedStreams> is_counted_;
  std::optional<OrderEvent> begin_;
  std::optional<OrderEvent> ready_;  // none: `ended_` is waited for
  std::optional<OrderEvent> ended_;
  std::optional<PassTimer> timer_;  // while passes are timed
  bool is_timed_pass_ = false;      // the latest one, not reported yet
  bool timing_failed_ = false;
  bool may_be_set_ = false;  // `ready_`, by an execution that was not waited for
};

}  // namespace offload::acl
