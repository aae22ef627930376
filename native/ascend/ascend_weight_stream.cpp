#include "ascend/ascend_weight_stream.hpp"

#include <utility>

#include "ascend/pinned_memory.hpp"
#include "ascend/substages.hpp"
#include "offload/errors.hpp"

namespace offload::acl {
namespace {

// The address of each weight in one piece of memory; 0 for a weight of no bytes.
std::vector<std::uint64_t> addresses_in(const StreamPlan& plan, std::uint64_t memory) {
  std::vector<std::uint64_t> found;
  for (const WeightPlacement& weight : plan.weights) {
    const bool is_empty = memory == 0 || weight.pieces.empty();
    found.push_back(is_empty ? 0 : memory + weight.pieces.front().memory_offset_bytes);
  }
  return found;
}

}  // namespace

AscendWeightStream::AscendWeightStream(int device, StreamPlan plan,
                                       std::vector<std::shared_ptr<WeightSource>> sources,
                                       std::uint64_t memory, std::function<void()> release,
                                       bool shares_store)
    : DeviceWeightStream((require_whole_weights(plan, "an Ascend device"), std::move(plan)),
                         std::move(sources)),
      runtime_(Runtime::get()),
      device_(runtime_, device),
      release_(std::move(release)) {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  try {
    if (!this->plan().transfers.empty()) make_order();
    set_memory(addresses_in(this->plan(), memory), {store_device(device), shares_store});
  } catch (...) {
    release_store();  // while the context is current
    release_order();
    throw;
  }
}

AscendWeightStream::~AscendWeightStream() { close(); }

void AscendWeightStream::make_order() {
  lane_.emplace(runtime_, 0);
  is_counted_.emplace();
  begin_.emplace(runtime_);
  const char* const what = "making an event that crosses the boundary of a model";
  if (makes_events(runtime_, kEventExternal, what)) {
    ready_.emplace(runtime_, kEventExternal);
  } else {
    ended_.emplace(runtime_);
  }
}

void AscendWeightStream::with_device(const std::function<void()>& work) const {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  work();
}

std::unique_ptr<HostMemory> AscendWeightStream::make_host_memory(std::size_t n_bytes) const {
  return std::make_unique<PinnedMemory>(runtime_, n_bytes);
}

void AscendWeightStream::copy_now(std::uint64_t to, const std::byte* from,
                                  std::size_t n_bytes) const {
  runtime_.check(
      runtime_.memcpy(reinterpret_cast<void*>(to), n_bytes, from, n_bytes, kHostToDevice),
      "copying a weight to the device");
}

void AscendWeightStream::enqueue_copy(std::uint64_t to, const StoredBytes& from,
                                      StreamAddress stream) const {
  runtime_.check(runtime_.memcpy_async(reinterpret_cast<void*>(to), from.size_bytes, from.from,
                                       from.size_bytes, kHostToDevice, static_cast<Stream>(stream)),
                 "copying a weight to the device");
}

void AscendWeightStream::wait_for(StreamAddress stream) const {
  runtime_.check(runtime_.synchronize_stream(static_cast<Stream>(stream)),
                 "waiting for executions before weights change");
  if (!lane_) return;
  runtime_.check(runtime_.synchronize_stream(lane()), "waiting for copies before weights change");
}

void AscendWeightStream::follow(StreamAddress stream) {
  const auto caller = static_cast<Stream>(stream);
  if (may_be_set_) forget_ready(caller);
  runtime_.check(runtime_.record_event(begin_->handle(), caller), "recording what comes before");
  runtime_.check(runtime_.wait_event(lane(), begin_->handle()), "waiting for what comes before");
}

// An event that is still set would let the next wait pass at once. Its waiters go on first.
void AscendWeightStream::forget_ready(Stream stream) {
  const char* const what = "waiting for an execution that failed";
  runtime_.check(runtime_.synchronize_stream(lane()), what);
  runtime_.check(runtime_.synchronize_stream(stream), what);
  runtime_.check(runtime_.reset_event(ready_->handle(), lane()), "resetting an event");
  runtime_.check(runtime_.synchronize_stream(lane()), what);
  may_be_set_ = false;
}

void AscendWeightStream::execute(Model model, Stream stream, Submission& submission) {
  if (copies().empty()) {
    runtime_.check(runtime_.model_execute_async(model, stream), "executing the model");
    return;
  }
  if (timer_) timer_->before(stream);
  if (enter(stream)) submission.end_substage(kPrologue);
  runtime_.check(runtime_.model_execute_async(model, lane()), "executing the model");
  leave(stream);
  if (timer_) timer_->behind(stream);
  is_timed_pass_ = timer_.has_value();
}

void AscendWeightStream::trace_weights(bool traces) {
  if (traces == timer_.has_value()) return;
  with_device([&] {
    timer_.reset();
    if (traces && PassTimer::is_possible(runtime_)) timer_.emplace(runtime_);
  });
}

PassReport AscendWeightStream::take_pass() {
  PassReport report = take_report();
  if (!std::exchange(is_timed_pass_, false)) return report;
  try {
    with_device([&] { timer_->report(report); });
  } catch (...) {
    timing_failed_ = true;  // whatever the cause
    throw;
  }
  return report;
}

void AscendWeightStream::wait_until_ready(StreamAddress stream) {
  const auto caller = static_cast<Stream>(stream);
  if (!ready_) {
    runtime_.check(runtime_.record_event(ended_->handle(), lane()), "recording an execution");
    runtime_.check(runtime_.wait_event(caller, ended_->handle()), "waiting for the outputs");
    return;
  }
  may_be_set_ = true;
  runtime_.check(runtime_.wait_event(caller, ready_->handle()), "waiting for the outputs");
  runtime_.check(runtime_.reset_event(ready_->handle(), caller), "waiting for the outputs");
  may_be_set_ = false;
}

void AscendWeightStream::rest() noexcept {
  const RelaxedCapture relaxed(runtime_);
  if (lane_) runtime_.synchronize_stream(lane());
}

void AscendWeightStream::release_order() noexcept {
  timer_.reset();
  ended_.reset();
  ready_.reset();
  begin_.reset();
  is_counted_.reset();
  lane_.reset();
}

void AscendWeightStream::release_memory() noexcept {
  if (release_) std::exchange(release_, nullptr)();
}

}  // namespace offload::acl
