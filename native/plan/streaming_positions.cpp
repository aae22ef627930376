#include "streaming_positions.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace offload {

PositionSearch::PositionSearch(const std::vector<double>& launch_ns)
    : n_launches_(static_cast<std::int64_t>(launch_ns.size())), until_ns_(launch_ns.size() + 1) {
  std::partial_sum(launch_ns.begin(), launch_ns.end(), until_ns_.begin() + 1);
}

std::optional<PositionSearch::Found> PositionSearch::quickest(const std::vector<RingPiece>& pieces,
                                                              const std::vector<double>& copy_ns,
                                                              std::int64_t capacity_bytes,
                                                              double limit_ns) {
  pieces_ = &pieces;
  copy_ns_ = &copy_ns;
  capacity_bytes_ = capacity_bytes;
  limit_ns_ = limit_ns;
  found_.reset();
  n_simulated_ = 0;
  prepare();
  join_launches();
  choose_wait(0);
  return std::move(found_);
}

void PositionSearch::prepare() {
  lasts_.clear();
  for (const RingPiece& piece : *pieces_) lasts_.push_back(piece.last_launch);
  std::sort(lasts_.begin(), lasts_.end());
  lasts_.erase(std::unique(lasts_.begin(), lasts_.end()), lasts_.end());
  for (std::size_t index = 0; index < pieces_->size(); ++index) {
    const auto last = std::lower_bound(lasts_.begin(), lasts_.end(), (*pieces_)[index].last_launch);
    last_of_[index] = last - lasts_.begin();
  }
  load_bytes_.fill(0);
}

// Merges launches between those that pieces wait for or that wait for pieces.
void PositionSearch::join_launches() {
  std::vector<std::int64_t>& begins = joined_begins_;
  begins.assign(1, 0);
  for (const RingPiece& piece : *pieces_) begins.push_back(piece.first_launch);
  for (const std::int64_t last : lasts_) begins.push_back(last + 1);
  begins.push_back(n_launches_);
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  const auto joined_of = [&begins](std::int64_t launch) {
    return std::lower_bound(begins.begin(), begins.end(), launch) - begins.begin();
  };
  joined_ns_.clear();
  for (std::size_t index = 0; index + 1 < begins.size(); ++index) {
    joined_ns_.push_back(until_ns_[static_cast<std::size_t>(begins[index + 1])] -
                         until_ns_[static_cast<std::size_t>(begins[index])]);
  }
  for (std::size_t index = 0; index < pieces_->size(); ++index) {
    joined_first_[index] = joined_of((*pieces_)[index].first_launch);
  }
  for (std::size_t last = 0; last < lasts_.size(); ++last) {
    joined_last_[last] = joined_of(lasts_[last] + 1) - 1;
  }
  simulator_.emplace(joined_ns_);
}

std::int64_t PositionSearch::step_of(std::int64_t wait) const {
  const auto n_lasts = static_cast<std::int64_t>(lasts_.size());
  return wait < 0 ? lasts_[static_cast<std::size_t>(wait + n_lasts)] - n_launches_
                  : lasts_[static_cast<std::size_t>(wait)];
}

// Tries all waits of the pieces from `index` on; earlier pieces have theirs.
void PositionSearch::choose_wait(std::size_t index) {
  if (index == pieces_->size()) return try_waits();
  const RingPiece& piece = (*pieces_)[index];
  const auto n_lasts = static_cast<std::int64_t>(lasts_.size());
  std::int64_t least = last_of_[index] - n_lasts;
  std::int64_t most = n_lasts - 1;
  for (std::size_t before = 0; before < index; ++before) {
    const bool is_earlier = (*pieces_)[before].first_launch < piece.first_launch;
    least = std::max(least, wait_of_[before] - (is_earlier ? 0 : n_lasts));
    most = std::min(most, wait_of_[before] + n_lasts);
  }
  for (std::int64_t wait = least; wait <= most && step_of(wait) < piece.first_launch; ++wait) {
    wait_of_[index] = wait;
    spans_of_[index] = 0;
    for (std::int64_t span = wait + 1; span <= last_of_[index]; ++span) {
      spans_of_[index] |= 1u << ((span + n_lasts) % n_lasts);
    }
    add_load(index, piece.size_bytes);
    if (fits()) choose_wait(index + 1);
    add_load(index, -piece.size_bytes);
  }
}

void PositionSearch::add_load(std::size_t index, std::int64_t bytes) {
  for (std::size_t span = 0; span < lasts_.size(); ++span) {
    if (((spans_of_[index] >> span) & 1u) != 0) load_bytes_[span] += bytes;
  }
}

bool PositionSearch::fits() const {
  return *std::max_element(load_bytes_.begin(), load_bytes_.end()) <= capacity_bytes_;
}

void PositionSearch::try_waits() {
  order_.resize(pieces_->size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [this](std::size_t one, std::size_t other) {
    return std::pair((*pieces_)[one].first_launch, wait_of_[one]) <
           std::pair((*pieces_)[other].first_launch, wait_of_[other]);
  });
  const auto n_lasts = static_cast<std::int64_t>(lasts_.size());
  const auto n_joined = static_cast<std::int64_t>(joined_ns_.size());
  transfers_.clear();
  for (const std::size_t index : order_) {
    const std::int64_t wait = wait_of_[index];
    const std::int64_t step =
        wait < 0 ? joined_last_[static_cast<std::size_t>(wait + n_lasts)] - n_joined
                 : joined_last_[static_cast<std::size_t>(wait)];
    transfers_.push_back({(*copy_ns_)[index], joined_first_[index], step});
  }
  ++n_simulated_;
  const double period_ns = simulator_->period_ns(transfers_);
  if (!(period_ns < limit_ns_)) return;
  rest_bytes_ = load_bytes_;
  top_bytes_.fill(0);
  if (place(0, 0, 0)) keep(period_ns);
}

// Places the pieces that are not in `placed`, from `lowest` upwards; at one position, those after
// `after`. Each lies on top of what it must not overlap. Returns false if they do not fit.
bool PositionSearch::place(std::uint32_t placed, std::int64_t lowest, std::size_t after) {
  if (placed + 1 == 1u << pieces_->size()) return true;
  for (std::size_t index = 0; index < pieces_->size(); ++index) {
    if (((placed >> index) & 1u) != 0) continue;
    const std::int64_t size_bytes = (*pieces_)[index].size_bytes;
    std::int64_t begin = 0;
    for (std::size_t span = 0; span < lasts_.size(); ++span) {
      if (((spans_of_[index] >> span) & 1u) != 0) begin = std::max(begin, top_bytes_[span]);
    }
    if (begin + size_bytes > capacity_bytes_) return false;  // nor on top of further pieces
    if (begin < lowest || (begin == lowest && index < after)) continue;
    const auto tops = top_bytes_;
    const auto rests = rest_bytes_;
    bool is_possible = true;
    for (std::size_t span = 0; span < lasts_.size(); ++span) {
      if (((spans_of_[index] >> span) & 1u) == 0) continue;
      top_bytes_[span] = begin + size_bytes;
      rest_bytes_[span] -= size_bytes;
      is_possible = is_possible && top_bytes_[span] + rest_bytes_[span] <= capacity_bytes_;
    }
    offset_of_[index] = begin;
    if (is_possible && place(placed | 1u << index, begin, index)) return true;
    top_bytes_ = tops;
    rest_bytes_ = rests;
  }
  return false;
}

void PositionSearch::keep(double period_ns) {
  limit_ns_ = period_ns;
  Found found;
  found.order = order_;
  found.period_ns = period_ns;
  for (std::size_t number = 0; number < order_.size(); ++number) {
    const std::size_t index = order_[number];
    found.offsets_bytes.push_back(offset_of_[index]);
    found.transfers.push_back(
        {(*copy_ns_)[index], (*pieces_)[index].first_launch, after_step(number, order_)});
  }
  found_ = std::move(found);
}

// The last reader of what transfer `number` overwrites.
std::int64_t PositionSearch::after_step(std::size_t number,
                                        const std::vector<std::size_t>& order) const {
  const std::size_t index = order[number];
  std::int64_t latest = std::numeric_limits<std::int64_t>::min();
  for (std::size_t other = 0; other < order.size(); ++other) {
    const std::size_t old = order[other];
    const std::int64_t old_end = offset_of_[old] + (*pieces_)[old].size_bytes;
    if (offset_of_[index] >= old_end ||
        offset_of_[old] >= offset_of_[index] + (*pieces_)[index].size_bytes) {
      continue;
    }
    const std::int64_t pass = other < number ? 0 : n_launches_;
    latest = std::max(latest, (*pieces_)[old].last_launch - pass);
  }
  return latest;
}

}  // namespace offload
