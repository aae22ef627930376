#include "streaming_ring.hpp"

#include <algorithm>
#include <limits>

namespace offload {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kSteps = 1024;
constexpr std::int64_t kNearSlot = 4;  // share of a slot within which the next slot is near

// The number of rounds in a ring of this size, with slots of `slot_bytes` unless it is 0. Writes
// the offsets.
std::int64_t rounds_of(const std::vector<RingPiece>& pieces, std::int64_t capacity_bytes,
                       std::int64_t slot_bytes, std::vector<std::int64_t>& offsets_bytes) {
  std::int64_t n_rounds = 1;
  std::int64_t end = 0;
  for (std::size_t index = 0; index < pieces.size(); ++index) {
    std::int64_t offset = round_up(end, pieces[index].alignment_bytes);
    if (slot_bytes > 0) {
      const std::int64_t slot = round_up(offset, slot_bytes);
      if (slot - offset <= slot_bytes / kNearSlot) offset = slot;
    }
    if (offset + pieces[index].size_bytes > capacity_bytes) {
      offset = 0;
      ++n_rounds;
    }
    offsets_bytes[index] = offset;
    end = offset + pieces[index].size_bytes;
  }
  return n_rounds;
}

}  // namespace

bool RingLayout::lay(const std::vector<RingPiece>& pieces, std::int64_t n_launches,
                     std::int64_t capacity_bytes, std::int64_t granule_bytes, bool slots) {
  offsets_bytes_.resize(pieces.size());
  after_steps_.resize(pieces.size());
  std::int64_t least = 0;
  std::int64_t alignment = 1;
  for (const RingPiece& piece : pieces) {
    least = std::max(least, piece.size_bytes);
    alignment = std::max(alignment, piece.alignment_bytes);
  }
  const std::int64_t slot_bytes = slots ? round_up(least, alignment) : 0;
  if (least > capacity_bytes) return false;
  const std::int64_t n_rounds = rounds_of(pieces, capacity_bytes, slot_bytes, offsets_bytes_);
  const std::int64_t step = std::max(granule_bytes, capacity_bytes / kSteps);
  std::int64_t fits = capacity_bytes;
  std::int64_t fails = least - 1;
  while (fits - fails > step) {
    const std::int64_t middle = fails + (fits - fails) / 2;
    const bool found = rounds_of(pieces, middle, slot_bytes, offsets_bytes_) <= n_rounds;
    (found ? fits : fails) = middle;
  }
  rounds_of(pieces, fits, slot_bytes, offsets_bytes_);
  measure(pieces);
  return find_steps(pieces, n_launches);
}

void RingLayout::measure(const std::vector<RingPiece>& pieces) {
  ring_bytes_ = 0;
  for (std::size_t index = 0; index < pieces.size(); ++index) {
    ring_bytes_ = std::max(ring_bytes_, offsets_bytes_[index] + pieces[index].size_bytes);
  }
}

bool RingLayout::find_steps(const std::vector<RingPiece>& pieces, std::int64_t n_launches) {
  old_.assign(1, {ring_bytes_, kNever});
  new_.clear();
  n_overwritten_ = 0;
  std::int64_t latest = kNever;
  for (std::int64_t pass = -1; pass <= 0; ++pass) {
    for (std::size_t index = 0; index < pieces.size(); ++index) {
      if (offsets_bytes_[index] == 0) end_round();
      const RingPiece& piece = pieces[index];
      const std::int64_t end = offsets_bytes_[index] + piece.size_bytes;
      after_steps_[index] = overwrite(end, pass * n_launches + piece.last_launch);
      if (pass < 0) continue;
      latest = std::max(latest, after_steps_[index]);
      if (latest >= piece.first_launch) return false;
    }
  }
  return true;
}

// Overwrites from the last piece's end up to `end` (a gap before a piece counts as the piece's);
// returns the last step that reads what is overwritten.
std::int64_t RingLayout::overwrite(std::int64_t end, std::int64_t step) {
  std::int64_t latest = kNever;
  std::int64_t begin = new_.empty() ? 0 : new_.back().end;
  while (n_overwritten_ < old_.size() && begin < end) {
    const Segment& segment = old_[n_overwritten_];
    latest = std::max(latest, segment.step);
    begin = segment.end;
    if (begin <= end) ++n_overwritten_;
  }
  new_.push_back({end, step});
  return latest;
}

void RingLayout::end_round() {
  new_.insert(new_.end(), old_.begin() + static_cast<std::ptrdiff_t>(n_overwritten_), old_.end());
  std::swap(old_, new_);
  new_.clear();
  n_overwritten_ = 0;
}

}  // namespace offload
