#include "streaming/device_weight_stream.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "offload/errors.hpp"

namespace offload {
namespace {

// Resident weights are read in pieces of this size.
constexpr std::size_t kStagingBytes = std::size_t{8} << 20;

const WeightPiece& piece_of(const StreamPlan& plan, const WeightTransfer& transfer) {
  return plan.weights[transfer.weight].pieces[transfer.piece];
}

}  // namespace

DeviceWeightStream::DeviceWeightStream(StreamPlan plan,
                                       std::vector<std::shared_ptr<WeightSource>> sources)
    : plan_((check_plan(plan), std::move(plan))), content_(plan_, std::move(sources)) {}

void DeviceWeightStream::set_memory(std::vector<std::uint64_t> addresses,
                                    const StoreOptions& store) {
  addresses_ = std::move(addresses);
  const HostStore::Make make = [this](std::size_t n_bytes) { return make_host_memory(n_bytes); };
  stored_ = std::make_unique<StoredWeights>(
      plan_, content_, StoreUse{store.device, make, store.is_shared, store.copies_move});
  first_transfers_.resize(plan_.n_launches);
  for (std::size_t index = 0; index < plan_.transfers.size(); ++index) {
    const WeightTransfer& transfer = plan_.transfers[index];
    const WeightPiece& piece = piece_of(plan_, transfer);
    copies_.push_back({{}, address(transfer.weight) + piece.offset_bytes, piece.size_bytes});
    first_transfers_[transfer.first_launch].push_back(index);
    pass_transfer_bytes_ += piece.size_bytes;
  }
  point_copies();
}

void DeviceWeightStream::point_copies() {
  for (std::size_t index = 0; index < copies_.size(); ++index) {
    const WeightTransfer& transfer = plan_.transfers[index];
    copies_[index].runs.clear();
    for (const HostRun& run : stored_->runs(transfer.weight, transfer.piece)) {
      copies_[index].runs.push_back({run.data(), run.size_bytes});
    }
  }
}

void DeviceWeightStream::attach(std::size_t n_launches, std::vector<std::size_t> for_next_pass) {
  if (plan_.n_launches != n_launches) {
    throw std::invalid_argument("the weights are streamed for " + std::to_string(plan_.n_launches) +
                                " launches, the program has " + std::to_string(n_launches));
  }
  content_.attach();
  prologue_ = std::move(for_next_pass);
}

// ---- content ------------------------------------------------------------------------------------

void DeviceWeightStream::replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources) {
  std::vector<std::size_t> weights;
  for (const auto& [weight, source] : sources) {
    check_weight(plan_, weight);
    check_source(plan_.weights[weight], *source);
    weights.push_back(weight);
  }
  stored_->claim(weights);
  content_.replace(std::move(sources));
}

void DeviceWeightStream::load(const std::function<void(std::uint64_t)>& progress) {
  {
    const std::lock_guard lock(mutex_);
    if (loading_ || executed_) {
      throw ExecutionError("weights cannot be loaded beside another load, or after an execution");
    }
    loading_ = true;
  }
  content_.note_all_stale();
  try {
    with_device([&] { read(progress, /*is_first=*/true); });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    loading_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  loading_ = false;
}

std::uint64_t DeviceWeightStream::load_bytes() const noexcept {
  std::uint64_t n_bytes = 0;
  for (const WeightPlacement& weight : plan_.weights) n_bytes += weight.size_bytes;
  return n_bytes;
}

// Called at rest: nothing on the device reads the store or the weight memory.
void DeviceWeightStream::read(const std::function<void(std::uint64_t)>& progress, bool is_first) {
  WeightRenewal renewal(content_);
  holds_prologue_ = false;
  renewal.begin();
  const std::size_t n_staging_bytes = staging_bytes(renewal.stale());
  const auto staging = n_staging_bytes == 0 ? nullptr : make_host_memory(n_staging_bytes);
  ReadBuffer buffer;
  std::uint64_t read_bytes = 0;
  const auto done = [&](std::size_t n_bytes) {
    read_bytes += n_bytes;
    if (progress) progress(read_bytes);
  };
  for (std::size_t weight = 0; weight < plan_.weights.size(); ++weight) {
    if (!renewal.stale()[weight] || content_.source(weight) == nullptr) continue;
    read_weight(weight, is_first, staging.get(), buffer, done);
    const bool is_copy = content_.source(weight)->mode() == ReadMode::kMemory;
    if (is_copy && stored_->is_streamed(weight)) renewal.let_go_of_memory(weight);
  }
  point_copies();
  renewal.commit();
  ++generation_;
}

// Size of the buffer through which resident pieces are copied to the device.
std::size_t DeviceWeightStream::staging_bytes(const std::vector<bool>& stale) const {
  std::size_t most_bytes = 0;
  for (std::size_t weight = 0; weight < stale.size(); ++weight) {
    if (!stale[weight]) continue;
    for (const WeightPiece& piece : plan_.weights[weight].pieces) {
      if (!piece.streamed) most_bytes = std::max(most_bytes, piece.size_bytes);
    }
  }
  return std::min(most_bytes, kStagingBytes);
}

void DeviceWeightStream::read_weight(std::size_t weight, bool is_first, const HostMemory* staging,
                                     ReadBuffer& buffer,
                                     const std::function<void(std::size_t)>& done) {
  const WeightPlacement& placement = plan_.weights[weight];
  try {
    for (std::size_t piece = 0; piece < placement.pieces.size(); ++piece) {
      if (placement.pieces[piece].streamed) {
        stored_->read(weight, piece, is_first, buffer, done);
      } else {
        read_resident(weight, placement.pieces[piece], staging, buffer, done);
      }
    }
  } catch (const FileError& error) {
    throw FileError(placement.name + ": " + error.what());
  }
}

void DeviceWeightStream::read_resident(std::size_t weight, const WeightPiece& piece,
                                       const HostMemory* staging, ReadBuffer& buffer,
                                       const std::function<void(std::size_t)>& done) {
  for (std::size_t at = 0; at < piece.size_bytes; at += kStagingBytes) {
    const std::size_t offset_bytes = piece.offset_bytes + at;
    const std::size_t n_bytes = std::min(kStagingBytes, piece.size_bytes - at);
    content_.source(weight)->read(offset_bytes, staging->data(), n_bytes, buffer);
    copy_now(address(weight) + offset_bytes, staging->data(), n_bytes);
    done(n_bytes);
  }
}

// ---- passes -------------------------------------------------------------------------------------

bool DeviceWeightStream::begin_pass(StreamAddress stream) {
  if (content_.is_closed()) throw ExecutionError(kStreamClosed);
  pass_bytes_ = 0;
  executed_ = true;
  if (!content_.is_stale()) return false;
  with_device([&] { wait_for(stream); });
  try {
    with_device([&] { read({}, /*is_first=*/false); });
  } catch (const FileError& error) {
    throw ExecutionError(error.what());
  }
  return true;
}

void DeviceWeightStream::enqueue(std::size_t transfer, StreamAddress stream) {
  const WeightCopy& copy = copies_[transfer];
  enqueue_copies(copy, stream);
  bytes_moved_ += copy.size_bytes;
  ++n_transfers_;
}

void DeviceWeightStream::enqueue_copies(const WeightCopy& copy, StreamAddress stream) const {
  std::uint64_t to = copy.to;
  for (const StoredBytes& run : copy.runs) {
    enqueue_copy(to, run, stream);
    to += run.size_bytes;
  }
}

bool DeviceWeightStream::enter(StreamAddress stream, PassMarks* marks) {
  const bool needs_prologue = !holds_prologue_;
  holds_prologue_ = false;
  lane_may_run_ = true;
  if (marks != nullptr) marks->before_pass(stream);
  follow(stream);
  if (!needs_prologue) return false;
  for (const std::size_t transfer : prologue_) {
    if (marks != nullptr) marks->before_copy(transfer);
    enqueue(transfer, lane_address());
    if (marks != nullptr) marks->behind_copy(transfer);
  }
  return !prologue_.empty();
}

void DeviceWeightStream::leave(StreamAddress stream) {
  try {
    wait_until_ready(stream);
  } catch (...) {
    rest();
    throw;
  }
  holds_prologue_ = true;
  bytes_moved_ += pass_transfer_bytes_;
  n_transfers_ += copies_.size();
  pass_bytes_ = pass_transfer_bytes_;
}

void DeviceWeightStream::issue_before(std::size_t launch, StreamAddress stream) {
  // Last copies of executables, or a prologue whose executable was not launched, may still run.
  if (std::exchange(lane_may_run_, false)) rest();
  holds_prologue_ = false;
  for (const std::size_t transfer : first_transfers_[launch]) {
    enqueue(transfer, stream);
    pass_bytes_ += copies_[transfer].size_bytes;
  }
}

PassReport DeviceWeightStream::take_report() noexcept {
  PassReport report;
  report.bytes = std::exchange(pass_bytes_, 0);
  report.is_timed = false;
  return report;
}

void DeviceWeightStream::close() noexcept {
  if (!content_.close()) return;
  with_device([this] {
    rest();
    release_store();
    release_order();
  });
  content_.drop();
}

void DeviceWeightStream::give_back() noexcept {
  if (!content_.is_closed()) return;
  const std::lock_guard lock(mutex_);  // two threads may close an executable at once
  with_device([this] { release_memory(); });
}

}  // namespace offload
