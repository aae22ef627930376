#include "cuda/cuda_weight_stream.hpp"

#include <algorithm>
#include <string>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload::cuda {
namespace {

// Weights are read in pieces of it.
constexpr std::size_t kStagingBytes = std::size_t{8} << 20;

void require_whole_weights(const StreamPlan& plan) {
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.pieces.size() <= 1) continue;
    throw PlanError(weight.name + ": on a CUDA device a weight lies in one piece, got " +
                    std::to_string(weight.pieces.size()));
  }
}

}  // namespace

CudaWeightStream::CudaWeightStream(int device, StreamPlan plan,
                                   std::vector<std::shared_ptr<WeightSource>> sources)
    : driver_(Driver::get()),
      context_(driver_, device),
      plan_((check_plan(plan), require_whole_weights(plan), std::move(plan))),
      sources_(std::move(sources)) {
  check_sources(plan_, sources_);
  stale_.weights.assign(plan_.weights.size(), true);
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  try {
    make_memory();
    make_copies();
  } catch (...) {
    let_go_of_driver();  // while the context is current
    throw;
  }
}

// Whoever had a tensor on the memory may have let go of it while kernels that read it run.
CudaWeightStream::~CudaWeightStream() {
  close();
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  if (addresses_) driver_.context_synchronize();
}

void CudaWeightStream::make_memory() {
  if (plan_.memory_bytes > 0) {
    const std::size_t n_bytes =
        round_up(plan_.memory_bytes, granularity_bytes(driver_, context_.device()));
    memory_.emplace(driver_, context_.device(), n_bytes);
    addresses_.emplace(driver_, n_bytes);
    addresses_->map(addresses_->address(), *memory_);
    addresses_->allow_access(addresses_->address(), n_bytes, context_.device());
  }
  if (plan_.transfers.empty()) return;
  lane_.emplace(driver_);
  begin_.emplace(driver_);
  ready_.emplace(driver_);
}

// Each streamed weight begins on a page, so that direct reads need no buffer where the file's
// offset allows.
void CudaWeightStream::make_copies() {
  std::size_t store_bytes = 0;
  std::vector<std::size_t> offsets(plan_.weights.size());
  for (const WeightTransfer& transfer : plan_.transfers) {
    offsets[transfer.weight] = store_bytes;
    store_bytes += whole_pages(plan_.weights[transfer.weight].size_bytes);
  }
  store_.emplace(driver_, store_bytes);
  stored_.assign(plan_.weights.size(), nullptr);
  first_transfers_.resize(plan_.n_launches);
  for (std::size_t index = 0; index < plan_.transfers.size(); ++index) {
    const WeightTransfer& transfer = plan_.transfers[index];
    stored_[transfer.weight] = store_->data() + offsets[transfer.weight];
    const std::size_t n_bytes = plan_.weights[transfer.weight].size_bytes;
    copies_.push_back({stored_[transfer.weight], address(transfer.weight), n_bytes});
    first_transfers_[transfer.first_launch].push_back(index);
    graph_bytes_ += n_bytes;
  }
}

DevicePointer CudaWeightStream::address(std::size_t weight) const {
  const WeightPlacement& placement = plan_.weights[weight];
  if (!addresses_ || placement.pieces.empty()) return 0;
  return addresses_->address() + placement.pieces.front().memory_offset_bytes;
}

// ---- content ------------------------------------------------------------------------------------

void CudaWeightStream::load(const std::function<void(std::uint64_t)>& progress) {
  {
    const std::lock_guard lock(mutex_);
    if (loading_ || executed_) {
      throw ExecutionError("weights cannot be loaded beside another load, or after an execution");
    }
    loading_ = true;
    stale_.weights.assign(plan_.weights.size(), true);
  }
  begin_anew_ = false;
  try {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    read(take_stale(), progress);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    loading_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  loading_ = false;
}

std::uint64_t CudaWeightStream::load_bytes() const noexcept {
  std::uint64_t n_bytes = 0;
  for (const WeightPlacement& weight : plan_.weights) n_bytes += weight.size_bytes;
  return n_bytes;
}

void CudaWeightStream::refresh(const std::vector<std::size_t>& weights) {
  for (const std::size_t weight : weights) check_weight(plan_, weight);
  const std::lock_guard lock(mutex_);
  if (closed_) throw ExecutionError(kStreamClosed);
  for (const std::size_t weight : weights) stale_.weights[weight] = true;
  if (!weights.empty()) begin_anew_ = true;
}

void CudaWeightStream::replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources) {
  for (const auto& [weight, source] : sources) {
    check_weight(plan_, weight);
    check_source(plan_.weights[weight], *source);
  }
  const std::lock_guard lock(mutex_);
  if (closed_) throw ExecutionError(kStreamClosed);
  for (auto& [weight, source] : sources) {
    stale_.replaced.emplace_back(weight, std::move(source));
    stale_.weights[weight] = true;
    begin_anew_ = true;
  }
}

ReadMode CudaWeightStream::mode(std::size_t weight) const {
  check_weight(plan_, weight);
  const std::lock_guard lock(mutex_);
  if (closed_) throw ExecutionError(kStreamClosed);
  return sources_[weight] ? sources_[weight]->mode() : ReadMode::kMemory;
}

void CudaWeightStream::attach() {
  const std::lock_guard lock(mutex_);
  if (attached_) {
    throw ExecutionError("this weight stream belongs to another executable; make one for each");
  }
  attached_ = true;
}

CudaWeightStream::Stale CudaWeightStream::take_stale() {
  const std::lock_guard lock(mutex_);
  Stale stale = std::exchange(stale_, {});
  stale_.weights.assign(plan_.weights.size(), false);
  return stale;
}

// What could not be read; what was replaced meanwhile comes after it.
void CudaWeightStream::put_back(Stale stale) {
  const std::lock_guard lock(mutex_);
  for (std::size_t weight = 0; weight < stale.weights.size(); ++weight) {
    if (stale.weights[weight]) stale_.weights[weight] = true;
  }
  begin_anew_ = true;
}

// At rest: nothing on the device reads the store or the weight memory.
void CudaWeightStream::read(Stale stale, const std::function<void(std::uint64_t)>& progress) {
  WeightFiles files;
  std::vector<std::shared_ptr<WeightSource>> let_go;  // unlocked: it may need the GIL
  holds_prologue_ = false;
  try {
    if (closed_) throw ExecutionError(kStreamClosed);
    {
      const std::lock_guard lock(mutex_);
      for (auto& [weight, source] : stale.replaced) sources_[weight].swap(source);
      look_up_sources(plan_, sources_, stale.weights, files);
    }
    const RegisteredMemory staging(driver_, staging_bytes(stale.weights));
    ReadBuffer buffer;
    std::uint64_t read_bytes = 0;
    const auto done = [&](std::size_t n_bytes) {
      read_bytes += n_bytes;
      if (progress) progress(read_bytes);
    };
    for (std::size_t weight = 0; weight < stale.weights.size(); ++weight) {
      if (!stale.weights[weight] || sources_[weight] == nullptr) continue;
      read_weight(weight, staging, buffer, done);
      const bool is_copy = sources_[weight]->mode() == ReadMode::kMemory;
      if (!is_copy || stored_[weight] == nullptr) continue;
      const std::lock_guard lock(mutex_);
      let_go.push_back(std::exchange(sources_[weight], nullptr));
    }
  } catch (...) {
    put_back(std::move(stale));
    throw;
  }
  ++generation_;
}

// Resident weights go to the device by way of it.
std::size_t CudaWeightStream::staging_bytes(const std::vector<bool>& stale) const {
  std::size_t most_bytes = 0;
  for (std::size_t weight = 0; weight < stale.size(); ++weight) {
    if (!stale[weight] || stored_[weight] != nullptr) continue;
    most_bytes = std::max(most_bytes, plan_.weights[weight].size_bytes);
  }
  return std::min(most_bytes, kStagingBytes);
}

void CudaWeightStream::read_weight(std::size_t weight, const RegisteredMemory& staging,
                                   ReadBuffer& buffer,
                                   const std::function<void(std::size_t)>& done) {
  const std::size_t size_bytes = plan_.weights[weight].size_bytes;
  std::byte* const stored = stored_[weight];
  try {
    for (std::size_t at = 0; at < size_bytes; at += kStagingBytes) {
      const std::size_t n_bytes = std::min(kStagingBytes, size_bytes - at);
      std::byte* const to = stored != nullptr ? stored + at : staging.data();
      sources_[weight]->read(at, to, n_bytes, buffer);
      if (stored == nullptr) {
        driver_.check(driver_.copy_to_device(address(weight) + at, to, n_bytes),
                      "copying a weight to the device");
      }
      done(n_bytes);
    }
  } catch (const FileError& error) {
    throw FileError(plan_.weights[weight].name + ": " + error.what());
  }
}

// ---- passes -------------------------------------------------------------------------------------

void CudaWeightStream::begin_pass(Stream stream) {
  if (closed_) throw ExecutionError(kStreamClosed);
  pass_bytes_ = 0;
  executed_ = true;
  if (!begin_anew_) return;
  const RelaxedCapture relaxed(driver_);
  driver_.check(driver_.stream_synchronize(stream), "waiting for executions before weights change");
  if (lane_) {
    driver_.check(driver_.stream_synchronize(lane_->handle()),
                  "waiting for copies before weights change");
  }
  begin_anew_ = false;  // what is refreshed from now on is for the next pass
  try {
    read(take_stale(), {});
  } catch (const FileError& error) {
    throw ExecutionError(error.what());
  }
}

void CudaWeightStream::enqueue(std::size_t transfer, Stream stream) {
  const WeightCopy& copy = copies_[transfer];
  driver_.check(driver_.copy_to_device_async(copy.to, copy.from, copy.size_bytes, stream),
                "copying a weight to the device");
  bytes_moved_ += copy.size_bytes;
  ++n_transfers_;
}

void CudaWeightStream::enter(Stream stream) {
  const bool needs_prologue = !holds_prologue_;
  holds_prologue_ = false;
  driver_.check(driver_.event_record(begin_->handle(), stream), "recording what comes before");
  driver_.check(driver_.stream_wait_event(lane(), begin_->handle(), 0),
                "waiting for what comes before");
  if (!needs_prologue) return;
  for (const std::size_t transfer : prologue_) enqueue(transfer, lane());
}

void CudaWeightStream::leave(Stream stream) {
  const Result result = driver_.stream_wait_event(stream, ready_->handle(), 0);
  if (result != kSuccess) {
    rest();
    driver_.fail(result, "waiting for the outputs");
  }
  holds_prologue_ = true;
  bytes_moved_ += graph_bytes_;
  n_transfers_ += copies_.size();
  pass_bytes_ = graph_bytes_;
}

void CudaWeightStream::issue_before(std::size_t launch, Stream stream) {
  if (holds_prologue_) rest();  // graphs ran before: their last copies may be under way
  holds_prologue_ = false;
  for (const std::size_t transfer : first_transfers_[launch]) {
    enqueue(transfer, stream);
    pass_bytes_ += copies_[transfer].size_bytes;
  }
}

PassReport CudaWeightStream::take_report() noexcept {
  PassReport report;
  report.bytes = std::exchange(pass_bytes_, 0);
  return report;
}

void CudaWeightStream::rest() noexcept {
  const RelaxedCapture relaxed(driver_);
  if (lane_) driver_.stream_synchronize(lane_->handle());
}

void CudaWeightStream::close() noexcept {
  std::vector<std::shared_ptr<WeightSource>> let_go;  // after the lock: it may need the GIL
  std::vector<std::pair<std::size_t, std::shared_ptr<WeightSource>>> replaced;
  if (closed_.exchange(true)) return;
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  rest();
  let_go_of_driver();
  const std::lock_guard lock(mutex_);
  let_go.swap(sources_);
  replaced.swap(stale_.replaced);
}

// All but the weight memory. With a current context.
void CudaWeightStream::let_go_of_driver() noexcept {
  store_.reset();
  ready_.reset();
  begin_.reset();
  lane_.reset();
}

void CudaWeightStream::give_back() noexcept {
  if (!closed_) return;
  const std::lock_guard lock(mutex_);  // two callers may close an executable at once
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  if (addresses_) driver_.context_synchronize();
  addresses_.reset();
  memory_.reset();
}

}  // namespace offload::cuda
