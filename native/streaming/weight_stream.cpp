#include "streaming/weight_stream.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/look_for.hpp"
#include "core/start_thread.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

// A fork, close and a new generation wait for at most one chunk to be read.
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;

}  // namespace

WeightStream::WeightStream(StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources,
                           bool poison)
    : plan_((check_plan(plan), std::move(plan))),
      memory_(plan_),
      content_(plan_, std::move(sources)),
      n_before_(transfers_before(plan_)),
      discarded_(plan_.weights.size(), false),
      n_reads_(plan_.weights.size(), 0) {
  make_hooks(poison);
  register_thread_owner(*this);
}

WeightStream::~WeightStream() {
  unregister_thread_owner(*this);
  end();
}

void WeightStream::make_hooks(bool poison) {
  hooks_.assign(plan_.n_launches, 0);
  poisons_.resize(plan_.n_launches);
  for (const WeightTransfer& one : plan_.transfers) {
    hooks_[one.after_launch] |= kSignals;
    if (!poison) continue;
    const WeightPiece& piece = plan_.weights[one.weight].pieces[one.piece];
    hooks_[one.last_launch] |= kPoisons;
    poisons_[one.last_launch].emplace_back(memory_.address(one.weight) + piece.offset_bytes,
                                           piece.size_bytes);
  }
}

// ---- generations --------------------------------------------------------------------------------

void WeightStream::load(const std::function<void(std::uint64_t)>& progress) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ExecutionError(kStreamClosed);
    if (loading_ || in_pass_) {
      throw ExecutionError("weights cannot be loaded beside an execution or another load");
    }
    loading_ = true;
  }
  content_.note_all_stale();
  try {
    begin_generation(progress);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    loading_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  loading_ = false;
  loaded_ = true;
}

// Halts the worker, reads again the resident weights that were replaced, and starts the
// worker at the first transfer.
void WeightStream::begin_generation(const std::function<void(std::uint64_t)>& progress) {
  WeightRenewal renewal(content_);
  Lock lock(mutex_);
  rest(lock);
  begin_anew_ = false;
  try {
    renewal.begin();
    watched_ = content_.watched();
    lock.unlock();
    if (separate_) memory_.separate();
    separate_ = false;
    read_residents(renewal.stale(), progress);
    lock.lock();
    if (closed_) throw ExecutionError(kStreamClosed);
    start_worker();
  } catch (...) {
    begin_anew_ = true;
    throw;
  }
  renewal.commit();
}

void WeightStream::read_residents(const std::vector<bool>& stale,
                                  const std::function<void(std::uint64_t)>& progress) {
  for (std::size_t weight = 0; weight < stale.size(); ++weight) {
    if (stale[weight]) discarded_[weight] = false;
  }
  if (discarded_bytes_ > 0) discarded_bytes_ = memory_.discard(plan_, discarded_);
  ReadBuffer buffer;
  std::uint64_t read_bytes = 0;
  for (std::size_t weight = 0; weight < stale.size(); ++weight) {
    if (!stale[weight]) continue;
    ++n_reads_[weight];
    for (const WeightPiece& piece : plan_.weights[weight].pieces) {
      for (std::size_t at = 0; !piece.streamed && at < piece.size_bytes; at += kChunkBytes) {
        const std::size_t chunk_bytes = std::min(kChunkBytes, piece.size_bytes - at);
        read_chunk(weight, piece, at, chunk_bytes, buffer);
        read_bytes += chunk_bytes;
        if (progress) progress(read_bytes);
      }
    }
  }
}

void WeightStream::read_chunk(std::size_t weight, const WeightPiece& piece, std::size_t done_bytes,
                              std::size_t chunk_bytes, ReadBuffer& buffer) {
  const std::size_t offset_bytes = piece.offset_bytes + done_bytes;
  const std::lock_guard lock(read_mutex_);
  try {
    content_.source(weight)->read(offset_bytes, memory_.address(weight) + offset_bytes, chunk_bytes,
                                  buffer);
  } catch (const std::exception& error) {
    throw FileError(plan_.weights[weight].name + ": " + error.what());
  }
}

std::uint64_t WeightStream::load_bytes() const noexcept {
  std::uint64_t n_bytes = 0;
  for (const WeightPlacement& weight : plan_.weights) {
    for (const WeightPiece& piece : weight.pieces) {
      if (!piece.streamed) n_bytes += piece.size_bytes;
    }
  }
  return n_bytes;
}

// Waits until the worker is idle.
void WeightStream::rest(Lock& lock) {
  stop_ = true;
  run_ = false;
  for_worker_.notify_all();
  for_others_.wait(lock, [this] { return !working_; });
}

// Under the mutex, at rest.
void WeightStream::start_worker() {
  arrived_ = 0;
  ended_ = 0;
  pass_ = arrived_before_ = ended_before_ = 0;
  failed_ = false;
  failure_.clear();
  ended_transfers_.clear();
  if (!plan_.transfers.empty()) {
    if (!has_worker_) worker_ = start_thread("stream weights", [this] { work(); });
    has_worker_ = true;
    stop_ = false;
    run_ = true;
    for_worker_.notify_all();
  }
  ++generation_;
}

// On the executing thread, which alone changes sources during a pass.
void WeightStream::note_changes() {
  for (const std::size_t weight : watched_) {
    if (content_.source(weight)->has_changed()) content_.note_stale(weight);
  }
}

void WeightStream::end() noexcept {
  std::thread worker;
  {
    const std::lock_guard lock(mutex_);
    content_.close();
    closed_ = true;
    stop_ = true;
    if (!failed_) failure_ = kStreamClosed;
    failed_ = true;
    begin_anew_ = true;
    for_worker_.notify_all();
    for_others_.notify_all();
    worker = std::move(worker_);
  }
  if (worker.joinable()) worker.join();
}

void WeightStream::close() noexcept {
  end();
  {
    Lock lock(mutex_);
    for_others_.wait(lock, [this] { return !working_; });  // another thread may be joining it
    if (loading_ || in_pass_) return;
  }
  content_.drop();
}

void WeightStream::give_back() noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_ && !loading_ && !in_pass_ && !separate_) memory_.give_back();
}

// ---- the worker ---------------------------------------------------------------------------------

void WeightStream::work() noexcept {
  ReadBuffer buffer;
  Lock lock(mutex_);
  while (true) {
    for_worker_.wait(lock, [this] { return closed_ || run_; });
    if (closed_) return;
    working_ = true;
    lock.unlock();
    std::string failure;
    try {
      stream_passes(buffer);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    under_way_begin_ns_ = 0;
    working_ = false;
    run_ = false;
    if (!failure.empty() && !failed_) {
      failure_ = std::move(failure);
      failed_ = true;
    }
    for_others_.notify_all();
  }
}

// Runs until it is stopped.
void WeightStream::stream_passes(ReadBuffer& buffer) {
  const std::uint64_t n_transfers = plan_.transfers.size();
  for (std::uint64_t number = 0;; ++number) {
    const std::uint64_t pass = number / n_transfers;
    const WeightTransfer& one = plan_.transfers[number % n_transfers];
    const bool waits = one.after_pass == 0 || pass > 0;
    const std::uint64_t waited_pass = one.after_pass == 0 ? pass : pass - 1;
    if (waits && !wait_for_launch(waited_pass * plan_.n_launches + one.after_launch + 1)) return;
    if (!carry_out(number, buffer)) return;
    arrived_ = number + 1;
    if (arrived_target_ <= number + 1) {
      const std::lock_guard lock(mutex_);
      for_others_.notify_all();
    }
  }
}

// Waits until `n_ended` launches have ended; returns false if the worker must rest.
bool WeightStream::wait_for_launch(std::uint64_t n_ended) {
  const auto reached = [&] { return stop_ || ended_ >= n_ended; };
  if (!look_for(reached)) {
    Lock lock(mutex_);
    ended_target_ = n_ended;
    for_worker_.wait(lock, reached);
    ended_target_ = kNobody;
  }
  return !stop_;
}

// Makes one transfer, by its number in the generation; returns false if the worker must rest.
bool WeightStream::carry_out(std::uint64_t number, ReadBuffer& buffer) {
  const std::uint64_t pass = number / plan_.transfers.size();
  const std::size_t index = number % plan_.transfers.size();
  const WeightTransfer& one = plan_.transfers[index];
  const WeightPiece& piece = plan_.weights[one.weight].pieces[one.piece];
  if (index == 0) pass_bytes_[pass % 2] = pass_busy_ns_[pass % 2] = 0;
  const std::uint64_t begin_ns = now_ns();
  under_way_ = index;
  under_way_begin_ns_ = begin_ns;
  bool whole = true;
  for (std::size_t at = 0; whole && at < piece.size_bytes; at += kChunkBytes) {
    whole = !stop_;
    if (whole) {
      read_chunk(one.weight, piece, at, std::min(kChunkBytes, piece.size_bytes - at), buffer);
    }
  }
  const std::uint64_t end_ns = now_ns();
  busy_ns_ += end_ns - begin_ns;
  under_way_begin_ns_ = 0;
  if (!whole) return false;
  bytes_moved_ += piece.size_bytes;
  ++n_transfers_;
  pass_bytes_[pass % 2] += piece.size_bytes;
  pass_busy_ns_[pass % 2] += end_ns - begin_ns;
  if (traced_) {
    const std::lock_guard lock(mutex_);
    ended_transfers_.push_back(
        {plan_.weights[one.weight].name, begin_ns, end_ns, piece.size_bytes});
  }
  return true;
}

// ---- the executing thread -----------------------------------------------------------------------

void WeightStream::begin_pass(std::size_t n_launches, bool traced) {
  if (n_launches != plan_.n_launches) {
    throw ExecutionError("the weights are streamed for " + std::to_string(plan_.n_launches) +
                         " launches, the program has " + std::to_string(n_launches));
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ExecutionError(kStreamClosed);
    if (loading_ || !loaded_) throw ExecutionError("the weights are not loaded; call load first");
    in_pass_ = true;
  }
  traced_pass_ = traced;
  traced_ = traced;
  report_ = PassReport();
  gathered_bytes_ = gather_ns_ = 0;
  note_changes();
  if (!begin_anew_ && !content_.is_stale()) return;
  try {
    begin_generation(nullptr);
  } catch (const std::exception& error) {
    in_pass_ = false;
    throw ExecutionError(error.what());
  }
}

void WeightStream::wait_for_weights(std::size_t launch) {
  const std::uint64_t n_arrived = arrived_before_ + n_before_[launch];
  const std::uint64_t begin_ns = now_ns();
  const auto reached = [&] { return failed_ || arrived_ >= n_arrived; };
  if (!look_for(reached)) {
    Lock lock(mutex_);
    arrived_target_ = n_arrived;
    for_others_.wait(lock, reached);
    arrived_target_ = kNobody;
  }
  note_wait(launch, begin_ns, now_ns());
  if (arrived_ >= n_arrived) return;
  const std::lock_guard lock(mutex_);
  throw ExecutionError(failure_);
}

void WeightStream::note_end(std::size_t launch) noexcept {
  for (const auto& [address, size_bytes] : poisons_[launch]) std::memset(address, 0xFF, size_bytes);
  if ((hooks_[launch] & kSignals) == 0) return;
  const std::uint64_t n_ended = ended_before_ + launch + 1;
  ended_ = n_ended;
  if (ended_target_ <= n_ended) {
    const std::lock_guard lock(mutex_);
    for_worker_.notify_all();
  }
}

void WeightStream::discard(const std::vector<std::size_t>& weights) {
  const auto is_resident = [this](std::size_t weight) {
    const std::vector<WeightPiece>& pieces = plan_.weights[weight].pieces;
    return std::none_of(pieces.begin(), pieces.end(), [](const auto& one) { return one.streamed; });
  };
  const std::lock_guard lock(mutex_);  // a fork sees the memory and its records in agreement
  if (memory_.is_shared()) return;
  for (const std::size_t weight : weights) discarded_[weight] = is_resident(weight);
  discarded_bytes_ = memory_.discard(plan_, discarded_);
}

void WeightStream::end_pass() {
  report_.bytes = pass_bytes_[pass_ % 2] + gathered_bytes_;
  report_.busy_ns = pass_busy_ns_[pass_ % 2] + gather_ns_;
  ++pass_;
  arrived_before_ += plan_.transfers.size();
  ended_before_ += plan_.n_launches;
  in_pass_ = false;
  if (traced_pass_) collect_transfers();
}

void WeightStream::collect_transfers() {
  const std::lock_guard lock(mutex_);
  report_.transfers = std::move(ended_transfers_);
  ended_transfers_.clear();
  const std::uint64_t begin_ns = under_way_begin_ns_;
  if (begin_ns == 0) return;
  const WeightTransfer& one = plan_.transfers[under_way_];
  const WeightPlacement& weight = plan_.weights[one.weight];
  report_.transfers.push_back(
      {weight.name, begin_ns, now_ns(), weight.pieces[one.piece].size_bytes});
}

void WeightStream::abandon_pass() noexcept {
  if (!in_pass_) return;
  begin_anew_ = true;
  stop_ = true;  // its pieces would be copied again
  in_pass_ = false;
}

// ---- forks --------------------------------------------------------------------------------------

void WeightStream::hold() noexcept {
  read_mutex_.lock();
  mutex_.lock();
  content_.hold();
}

void WeightStream::release() noexcept {
  content_.release();
  mutex_.unlock();
  read_mutex_.unlock();
}

// The parent's threads do not exist here and may be neither joined nor notified. A pass can be
// under way only if one of its launches forks; the content of its weights is then undefined.
void WeightStream::restart() noexcept {
  new (&worker_) std::thread();
  new (&for_worker_) std::condition_variable();
  new (&for_others_) std::condition_variable();
  new (&mutex_) std::mutex();
  new (&read_mutex_) std::mutex();
  content_.restart();
  has_worker_ = working_ = run_ = loading_ = false;
  arrived_target_ = ended_target_ = kNobody;
  under_way_begin_ns_ = 0;
  arrived_ = 0;
  failure_ = "the process was forked during this execution; execute again";
  failed_ = true;
  begin_anew_ = true;
  if (memory_.is_shared()) {
    separate_ = true;
    content_.note_all_stale();
  }
}

}  // namespace offload
