#include "streaming/stored_weights.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

std::string shared_text(const std::string& name) {
  return name +
         ": its new content has no place: its bytes on the host are used by another weight or "
         "executable too, whose results must not change, and a model of this device copies from "
         "where it was "
         "captured. Close the other one, or load this one with share_store=False";
}

}  // namespace

StoredWeights::StoredWeights(const StreamPlan& plan, const WeightContent& content, StoreUse use)
    : plan_(plan), content_(content), use_(std::move(use)), store_(HostStore::of_process()) {
  for (const WeightPlacement& weight : plan_.weights) runs_.emplace_back(weight.pieces.size());
  for (const WeightTransfer& transfer : plan_.transfers) take(transfer.weight, transfer.piece);
}

void StoredWeights::take(std::size_t weight, std::size_t piece) {
  const WeightPiece& streamed = plan_.weights[weight].pieces[piece];
  std::vector<HostRun>& runs = runs_[weight][piece];
  const std::optional<FilePlace> place = content_.source(weight)->place();
  if (place && use_.is_shared) {
    runs = store_.take(key_of(*place), place->offset_bytes + streamed.offset_bytes,
                       streamed.size_bytes, use_.make);
  } else {
    runs = {{store_.take_private(streamed.size_bytes, use_.make), 0, streamed.size_bytes}};
  }
}

bool StoredWeights::is_streamed(std::size_t weight) const {
  const auto& pieces = runs_[weight];
  return std::any_of(pieces.begin(), pieces.end(), [](const auto& runs) { return !runs.empty(); });
}

void StoredWeights::read(std::size_t weight, std::size_t piece, bool is_first, ReadBuffer& buffer,
                         const std::function<void(std::size_t)>& done) {
  std::size_t offset_bytes = plan_.weights[weight].pieces[piece].offset_bytes;
  for (HostRun& run : runs_[weight][piece]) {
    const std::size_t n_bytes = run.size_bytes;
    renew(run, weight, {*content_.source(weight), offset_bytes, is_first, buffer, done});
    offset_bytes += n_bytes;
  }
}

void StoredWeights::renew(HostRun& run, std::size_t weight, const Reading& reading) {
  const std::optional<FilePlace> place = reading.source.place();
  const bool is_listed = place && use_.is_shared;
  if (is_listed && use_listed(run, *place, reading)) return;
  HostRun own = own_memory(run, weight);
  for (std::size_t at = 0; at < own.size_bytes; at += HostSlab::kStepBytes) {
    const std::size_t n_bytes = std::min(HostSlab::kStepBytes, own.size_bytes - at);
    reading.source.read(reading.offset_bytes + at, own.data() + at, n_bytes, reading.buffer);
    reading.done(n_bytes);
  }
  if (is_listed && own.size_bytes == own.slab->size_bytes()) {
    own.slab->note_filled();
    store_.list(own.slab, key_of(*place), place->offset_bytes + reading.offset_bytes);
  }
  use(run, std::move(own));
}

// Uses the listed bytes of the file as it is now, if copies can read them there and they equal
// the file's content.
bool StoredWeights::use_listed(HostRun& run, const FilePlace& place, const Reading& reading) {
  const std::size_t in_file = place.offset_bytes + reading.offset_bytes;
  HostRun found = store_.find(key_of(place), in_file, run.size_bytes);
  const bool is_same_place = found.slab == run.slab && found.offset_bytes == run.offset_bytes;
  if (!found.slab || !(is_same_place || use_.copies_move)) return false;
  HostSlab& slab = *found.slab;
  if (is_same_place) found.slab.reset();  // the run holds it, perhaps as the only user
  const std::size_t slab_in_file = in_file - found.offset_bytes;
  const auto read = [&](std::size_t offset_bytes, std::byte* to, std::size_t n_bytes) {
    place.file->read(slab_in_file + offset_bytes, to, n_bytes, reading.buffer);
  };
  ReadBuffer again;
  const std::size_t end = found.offset_bytes + found.size_bytes;
  for (std::size_t at = found.offset_bytes; at < end;) {
    const std::size_t n_bytes =
        reading.is_first ? slab.fill(at, end, read) : slab.fill_or_compare(at, end, again, read);
    if (n_bytes == 0) {
      store_.delist(slab);
      return false;
    }
    reading.done(n_bytes);
    at += n_bytes;
  }
  if (!is_same_place) use(run, std::move(found));
  return true;
}

// The run's memory unless it has other users. The rest of a larger slab is released with it.
HostRun StoredWeights::own_memory(const HostRun& run, std::size_t weight) {
  const bool is_own = store_.claim({&run}) < 0;
  if (is_own && (run.size_bytes == run.slab->size_bytes() || !use_.copies_move)) return run;
  if (!use_.copies_move) throw ExecutionError(shared_text(plan_.weights[weight].name));
  return {store_.take_private(run.size_bytes, use_.make), 0, run.size_bytes};
}

void StoredWeights::use(HostRun& run, HostRun found) {
  if (found.slab == run.slab && found.offset_bytes == run.offset_bytes) return;
  const std::lock_guard lock(mutex_);
  moved_.push_back(run.slab);
  run = std::move(found);
}

void StoredWeights::claim(const std::vector<std::size_t>& weights) {
  if (use_.copies_move) return;
  std::vector<const HostRun*> runs;
  std::vector<std::size_t> names;
  const std::lock_guard lock(mutex_);
  for (const std::size_t weight : weights) {
    if (weight >= runs_.size()) continue;  // released
    for (const auto& piece : runs_[weight]) {
      for (const HostRun& run : piece) {
        runs.push_back(&run);
        names.push_back(weight);
      }
    }
  }
  const std::ptrdiff_t used = store_.claim(runs);
  if (used < 0) return;
  throw ExecutionError(shared_text(plan_.weights[names[static_cast<std::size_t>(used)]].name));
}

void StoredWeights::forget_moved() noexcept {
  std::vector<std::shared_ptr<HostSlab>> moved;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  moved.swap(moved_);
}

void StoredWeights::release() noexcept {
  std::vector<std::vector<std::vector<HostRun>>> runs;  // destroyed after the lock is released
  std::vector<std::shared_ptr<HostSlab>> moved;
  const std::lock_guard lock(mutex_);
  runs.swap(runs_);
  moved.swap(moved_);
}

std::size_t StoredWeights::size_bytes() const {
  std::size_t n_bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& pieces : runs_) {
    for (const auto& piece : pieces) {
      for (const HostRun& run : piece) n_bytes += run.size_bytes;
    }
  }
  return n_bytes;
}

std::size_t StoredWeights::shared_bytes() const {
  std::map<const HostSlab*, long> n_own;
  const std::lock_guard lock(mutex_);
  for (const auto& slab : moved_) ++n_own[slab.get()];
  for (const auto& pieces : runs_) {
    for (const auto& piece : pieces) {
      for (const HostRun& run : piece) ++n_own[run.slab.get()];
    }
  }
  std::size_t n_bytes = 0;
  for (const auto& pieces : runs_) {
    for (const auto& piece : pieces) {
      for (const HostRun& run : piece) {
        if (run.slab.use_count() > n_own[run.slab.get()]) n_bytes += run.size_bytes;
      }
    }
  }
  return n_bytes;
}

}  // namespace offload
