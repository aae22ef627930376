// Weights of a program on a CUDA device, part of which each execution copies there.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cuda/cuda_weight_memory.hpp"
#include "streaming/device_weight_stream.hpp"

namespace offload::cuda {

// The weight memory is mapped, the store is registered with the driver, and the executable is a
// graph that records `ready` when its outputs are ready.
//
// If the driver refuses to wait for the context, the weight memory stays allocated until the
// process ends.
//
// Owner, thread, errors: as DeviceWeightStream. The constructor throws BackendUnavailable if there
// is no such device, PlanError for pieces that the device cannot map, OutOfMemory if the device
// lacks memory, and ExecutionError if the host does; it leaves nothing behind.
class CudaWeightStream final : public DeviceWeightStream {
 public:
  // `shares_store`: streamed bytes may be shared with other executables.
  CudaWeightStream(int device, StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources,
                   bool shares_store);
  ~CudaWeightStream() override;

  // Identifies a device's part of the host store: copies of a graph keep to the context in which
  // their memory was registered.
  static StoreDevice store_device(int device) { return {&Driver::get(), device}; }

  // The event that each graph records when its outputs are ready.
  Event ready() const { return ready_->handle(); }

  // The stream on which graphs run.
  Stream lane() const { return lane_->handle(); }

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

  const Driver& driver_;
  PrimaryContext context_;
  std::unique_ptr<CudaWeightMemory> memory_;
  std::optional<OwnStream> lane_;
  std::optional<OrderEvent> begin_;
  std::optional<OrderEvent> ready_;
};

}  // namespace offload::cuda
