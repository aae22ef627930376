#include "cuda/cuda_weight_stream.hpp"

#include <utility>

#include "cuda/cuda_streams.hpp"

namespace offload::cuda {

CudaWeightStream::CudaWeightStream(int device, StreamPlan plan,
                                   std::vector<std::shared_ptr<WeightSource>> sources,
                                   bool shares_store)
    : DeviceWeightStream(std::move(plan), std::move(sources)),
      driver_(Driver::get()),
      context_(driver_, device) {
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  try {
    memory_ = std::make_unique<CudaWeightMemory>(driver_, context_.device(), this->plan());
    make_order();
    set_memory(memory_->addresses(), {store_device(device), shares_store, /*copies_move=*/true});
  } catch (...) {
    release_store();  // while the context is current
    release_order();
    throw;
  }
}

// The owner of a tensor on the memory may have released it while kernels that read it run.
CudaWeightStream::~CudaWeightStream() {
  close();
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  release_memory();
}

void CudaWeightStream::make_order() {
  if (plan().transfers.empty()) return;
  lane_.emplace(driver_);
  begin_.emplace(driver_);
  ready_.emplace(driver_);
}

void CudaWeightStream::with_device(const std::function<void()>& work) const {
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  work();
}

std::unique_ptr<HostMemory> CudaWeightStream::make_host_memory(std::size_t n_bytes) const {
  return std::make_unique<RegisteredMemory>(driver_, n_bytes);
}

void CudaWeightStream::copy_now(std::uint64_t to, const std::byte* from,
                                std::size_t n_bytes) const {
  driver_.check(driver_.copy_to_device(to, from, n_bytes), "copying a weight to the device");
}

void CudaWeightStream::enqueue_copy(std::uint64_t to, const StoredBytes& from,
                                    StreamAddress stream) const {
  driver_.check(
      driver_.copy_to_device_async(to, from.from, from.size_bytes, static_cast<Stream>(stream)),
      "copying a weight to the device");
}

void CudaWeightStream::wait_for(StreamAddress stream) const {
  driver_.check(driver_.stream_synchronize(static_cast<Stream>(stream)),
                "waiting for executions before weights change");
  if (!lane_) return;
  driver_.check(driver_.stream_synchronize(lane_->handle()),
                "waiting for copies before weights change");
}

void CudaWeightStream::follow(StreamAddress stream) {
  driver_.check(driver_.event_record(begin_->handle(), static_cast<Stream>(stream)),
                "recording what comes before");
  driver_.check(driver_.stream_wait_event(lane(), begin_->handle(), 0),
                "waiting for what comes before");
}

void CudaWeightStream::wait_until_ready(StreamAddress stream) {
  driver_.check(driver_.stream_wait_event(static_cast<Stream>(stream), ready_->handle(), 0),
                "waiting for the outputs");
}

void CudaWeightStream::rest() noexcept {
  const RelaxedCapture relaxed(driver_);
  if (lane_) driver_.stream_synchronize(lane_->handle());
}

void CudaWeightStream::release_order() noexcept {
  ready_.reset();
  begin_.reset();
  lane_.reset();
}

void CudaWeightStream::release_memory() noexcept {
  if (!memory_) return;
  const Result result = driver_.context_synchronize();
  if (result != kSuccess && !CudaStreams::is_fault(result)) {
    static_cast<void>(
        memory_.release());  // no wait was possible, so the memory stays until the process ends
  }
  memory_.reset();
}

}  // namespace offload::cuda
