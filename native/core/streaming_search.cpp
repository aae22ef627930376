#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "offload/streaming.hpp"
#include "streaming_ring.hpp"

namespace offload {
namespace {

// Of so few weights all sets are tried, and of each all ways to cut it into rounds.
constexpr std::size_t kFewItems = 8;

// Below a page a weight stays, whatever is searched.
constexpr std::int64_t kSmallestBytes = 4096;

// From one level of memory to the next this part of what is saved against holding all weights.
constexpr std::int64_t kLevelsPerHalving = 256;

// The ring, in units of the largest piece. 1 takes turns with the launches that read it, 2 copies
// while they run, more smooth launches of unlike lengths.
constexpr std::array<double, 7> kDepths = {2.0, 1.0, 1.5, 2.5, 3.0, 4.0, 6.0};

// Pieces smaller than this part of the largest stay: each costs the link's overhead.
constexpr std::array<double, 5> kLeastShares = {0.9, 0.6, 0.3, 0.05, 0.0};

// Tails that are cut into more pieces than are needed, for one that ends the last round.
constexpr int kMostExtra = 1;

// Of sums of times in another order.
constexpr double kRounding = 1e-9;

// The largest pieces that are tried: from the largest weight down by a factor of 2^(1/6).
constexpr int kMostUnits = 96;
constexpr double kUnitsPerHalving = 6.0;

std::int64_t round_up(std::int64_t number, std::int64_t unit) {
  return (number + unit - 1) / unit * unit;
}

struct Item {
  std::size_t weight;
  std::int64_t size_bytes;
  std::int64_t aligned_bytes;
  std::int64_t first_launch;
  std::int64_t last_launch;
};

// What is streamed of an item, and the resident memory that this saves.
struct Part {
  std::int64_t streamed_bytes = 0;
  std::int64_t saved_bytes = 0;
};

// Which items may be streamed, in pieces of at most `unit_bytes`.
struct Family {
  bool tails;
  bool long_spans;
  double least_share;
  std::int64_t unit_bytes;
  std::int64_t most_saved_bytes;
  std::int64_t n_items;
};

class Search {
 public:
  Search(const std::vector<double>& launch_ns, const std::vector<StreamingWeight>& weights,
         const StreamingOptions& options);
  StreamingSearch run();

 private:
  void make_families();
  void search_all_sets();
  void search_level(std::int64_t saved_bytes);
  void try_candidate(const Family& family, std::int64_t saved_bytes, double depth, int n_extra);
  void list_pieces();
  void simulate_candidate();
  bool choose(const Family& family, std::int64_t needed_bytes, int n_extra);
  void trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes);
  void keep();
  Part part(const Item& item, const Family& family) const;
  Part part(const Item& item, bool tails, std::int64_t unit_bytes) const;
  bool is_long(const Item& item) const { return item.last_launch > item.first_launch; }
  double bytes_ns(std::int64_t bytes) const {
    return static_cast<double>(bytes) / options_.link_bytes_per_second * 1e9;
  }

  const std::vector<StreamingWeight>& weights_;
  const StreamingOptions options_;
  const std::int64_t n_launches_;
  StreamingSimulator simulator_;
  double compute_ns_;
  std::int64_t full_bytes_ = 0;     // of memory that holds all weights
  std::int64_t padding_bytes_ = 0;  // of which
  std::vector<Item> items_;
  std::vector<Family> families_;
  double best_ns_;
  std::int64_t best_bytes_ = std::numeric_limits<std::int64_t>::max();
  StreamingSearch found_;
  // Of the candidate at hand.
  std::vector<Part> parts_;
  std::vector<std::size_t> chosen_;
  std::vector<RingPiece> pieces_;
  std::vector<StreamingTransfer> transfers_;
  RingLayout ring_;
};

Search::Search(const std::vector<double>& launch_ns, const std::vector<StreamingWeight>& weights,
               const StreamingOptions& options)
    : weights_(weights),
      options_(options),
      n_launches_(static_cast<std::int64_t>(launch_ns.size())),
      simulator_(launch_ns),
      compute_ns_(simulator_.period_ns({})),
      best_ns_(options.floor_period_ns) {
  for (std::size_t index = 0; index < weights.size(); ++index) {
    const StreamingWeight& weight = weights[index];
    const std::int64_t aligned_bytes = round_up(weight.size_bytes, options.alignment_bytes);
    full_bytes_ += aligned_bytes;
    padding_bytes_ += aligned_bytes - weight.size_bytes;
    if (weight.stays || weight.size_bytes < kSmallestBytes) continue;
    items_.push_back(
        {index, weight.size_bytes, aligned_bytes, weight.first_launch, weight.last_launch});
  }
  std::stable_sort(items_.begin(), items_.end(), [](const Item& one, const Item& other) {
    return one.first_launch < other.first_launch;
  });
  parts_.resize(items_.size());
}

Part Search::part(const Item& item, bool tails, std::int64_t unit_bytes) const {
  if (item.size_bytes <= unit_bytes) return {item.size_bytes, item.aligned_bytes};
  if (!tails) return {};
  const std::int64_t resident_bytes =
      round_up(item.size_bytes - unit_bytes, options_.granule_bytes);
  if (resident_bytes >= item.size_bytes) return {};
  return {item.size_bytes - resident_bytes, item.aligned_bytes - resident_bytes};
}

Part Search::part(const Item& item, const Family& family) const {
  if (is_long(item) && !family.long_spans) return {};
  const Part found = part(item, family.tails, family.unit_bytes);
  const double least = family.least_share * static_cast<double>(family.unit_bytes);
  return static_cast<double>(found.streamed_bytes) < least ? Part{} : found;
}

void Search::make_families() {
  std::int64_t largest = 0;
  bool has_long = false;
  std::vector<std::int64_t> sizes;
  for (const Item& item : items_) {
    largest = std::max(largest, item.size_bytes);
    has_long = has_long || is_long(item);
    sizes.push_back(item.size_bytes);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  std::vector<std::int64_t> units;
  for (int step = 0; step < kMostUnits; ++step) {
    const auto unit = static_cast<std::int64_t>(static_cast<double>(largest) *
                                                std::exp2(-step / kUnitsPerHalving));
    const std::int64_t rounded = round_up(unit, options_.granule_bytes);
    if (units.empty() || rounded < units.back()) units.push_back(rounded);
  }
  const std::size_t stride = 1 + (sizes.size() - 1) / kMostUnits;
  for (const bool long_spans : {false, true}) {
    if (long_spans && !has_long) continue;
    for (const bool tails : {false, true}) {
      if (tails && !options_.tails) continue;
      std::vector<std::int64_t> tried = units;
      if (!tails) {
        tried.clear();
        for (std::size_t index = sizes.size(); index > 0; index -= std::min(index, stride)) {
          tried.push_back(sizes[index - 1]);
        }
      }
      for (const double least_share : kLeastShares) {
        for (const std::int64_t unit : tried) {
          Family family{tails, long_spans, least_share, unit, 0, 0};
          for (const Item& item : items_) {
            const Part found = part(item, family);
            family.most_saved_bytes += found.saved_bytes;
            family.n_items += found.saved_bytes > 0 ? 1 : 0;
          }
          if (family.most_saved_bytes > 0) families_.push_back(family);
        }
      }
    }
  }
}

StreamingSearch Search::run() {
  if (items_.empty()) return std::move(found_);
  if (items_.size() <= kFewItems) search_all_sets();
  make_families();
  // The levels, by what each saves against holding all weights: from the budget's downwards.
  std::vector<std::int64_t> levels;
  const std::int64_t least_saved = full_bytes_ - options_.budget_bytes;
  for (std::int64_t saved = full_bytes_ - options_.floor_bytes; saved >= least_saved && saved > 0;
       saved -= std::max(options_.alignment_bytes, saved / kLevelsPerHalving)) {
    levels.push_back(saved);
  }
  for (std::size_t level = levels.size(); level > 0; --level) {
    const double bound_ns = std::max(compute_ns_, bytes_ns(levels[level - 1] - padding_bytes_));
    if (bound_ns >= best_ns_) break;
    search_level(levels[level - 1]);
  }
  return std::move(found_);
}

void Search::search_all_sets() {
  for (std::uint32_t set = 1; set < 1u << items_.size(); ++set) {
    chosen_.clear();
    std::int64_t saved_bytes = 0;
    for (std::size_t index = 0; index < items_.size(); ++index) {
      if (((set >> index) & 1u) == 0) continue;
      parts_[index] = {items_[index].size_bytes, items_[index].aligned_bytes};
      saved_bytes += items_[index].aligned_bytes;
      chosen_.push_back(index);
    }
    const std::int64_t capacity_bytes = options_.budget_bytes - (full_bytes_ - saved_bytes);
    list_pieces();
    for (std::uint32_t begins = 0; begins < 1u << (chosen_.size() - 1); ++begins) {
      if (ring_.lay_rounds(pieces_, n_launches_, begins, capacity_bytes)) simulate_candidate();
    }
  }
}

void Search::search_level(std::int64_t saved_bytes) {
  for (const Family& family : families_) {
    for (const double depth : kDepths) {
      for (int n_extra = 0; n_extra <= (family.tails ? kMostExtra : 0); ++n_extra) {
        try_candidate(family, saved_bytes, depth, n_extra);
      }
    }
  }
}

void Search::try_candidate(const Family& family, std::int64_t saved_bytes, double depth,
                           int n_extra) {
  const std::int64_t capacity_bytes =
      round_up(static_cast<std::int64_t>(depth * static_cast<double>(family.unit_bytes)),
               family.tails ? options_.granule_bytes : options_.alignment_bytes);
  const std::int64_t needed_bytes = saved_bytes + capacity_bytes;
  if (needed_bytes > family.most_saved_bytes) return;
  const std::int64_t most_bytes = family.unit_bytes + options_.alignment_bytes;
  const std::int64_t n_copies = (needed_bytes + most_bytes - 1) / most_bytes;
  const double bound_ns = bytes_ns(needed_bytes - padding_bytes_) +
                          static_cast<double>(n_copies) * options_.link_overhead_ns;
  // Of plans that take no more than computing, the one that copies least.
  const bool is_hidden = best_ns_ <= compute_ns_;
  if (is_hidden ? needed_bytes - padding_bytes_ >= best_bytes_ : bound_ns >= best_ns_) return;
  if (!choose(family, needed_bytes, n_extra)) return;
  list_pieces();
  for (const bool slots : {true, false}) {
    if (ring_.lay(pieces_, n_launches_, capacity_bytes, options_.alignment_bytes, slots)) {
      simulate_candidate();
    }
  }
}

void Search::list_pieces() {
  pieces_.clear();
  for (const std::size_t index : chosen_) {
    const Item& item = items_[index];
    const bool whole = parts_[index].streamed_bytes == item.size_bytes;
    const std::int64_t unit = whole ? options_.alignment_bytes : options_.granule_bytes;
    pieces_.push_back(
        {round_up(parts_[index].streamed_bytes, unit), unit, item.first_launch, item.last_launch});
  }
}

void Search::simulate_candidate() {
  transfers_.clear();
  for (std::size_t order = 0; order < chosen_.size(); ++order) {
    transfers_.push_back(
        {options_.link_overhead_ns + bytes_ns(parts_[chosen_[order]].streamed_bytes),
         pieces_[order].first_launch, ring_.after_steps()[order]});
  }
  ++found_.n_candidates;
  double period_ns = simulator_.period_ns(transfers_);
  if (period_ns <= compute_ns_ * (1 + kRounding)) period_ns = compute_ns_;
  std::int64_t bytes = 0;
  for (const std::size_t index : chosen_) bytes += parts_[index].streamed_bytes;
  if (period_ns < best_ns_ || (period_ns <= best_ns_ && bytes < best_bytes_)) {
    best_ns_ = period_ns;
    best_bytes_ = bytes;
    keep();
  }
}

// Chooses items whose parts save enough, spread evenly over what the family could stream.
bool Search::choose(const Family& family, std::int64_t needed_bytes, int n_extra) {
  const double rate = static_cast<double>(needed_bytes + n_extra * family.unit_bytes) /
                      static_cast<double>(family.most_saved_bytes);
  if (rate > 1) return false;
  chosen_.clear();
  std::int64_t chosen_bytes = 0;
  double due_bytes = 0;
  for (std::size_t index = 0; index < items_.size(); ++index) {
    const Part found = part(items_[index], family);
    parts_[index] = {};
    due_bytes += rate * static_cast<double>(found.saved_bytes);
    if (found.saved_bytes == 0 || due_bytes < 0.5 * static_cast<double>(found.saved_bytes)) {
      continue;
    }
    due_bytes -= static_cast<double>(found.saved_bytes);
    parts_[index] = found;
    chosen_bytes += found.saved_bytes;
  }
  for (std::size_t index = 0; index < items_.size() && chosen_bytes < needed_bytes; ++index) {
    if (parts_[index].saved_bytes > 0) continue;
    parts_[index] = part(items_[index], family);
    chosen_bytes += parts_[index].saved_bytes;
  }
  if (chosen_bytes < needed_bytes) return false;
  trim(family, needed_bytes, chosen_bytes);
  for (std::size_t index = 0; index < items_.size(); ++index) {
    if (parts_[index].saved_bytes > 0) chosen_.push_back(index);
  }
  return true;
}

// Gives back what is more than needed: whole items, and then the tops of the largest parts.
void Search::trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes) {
  if (!family.tails) {
    for (Part& one : parts_) {
      if (one.saved_bytes == 0 || chosen_bytes - one.saved_bytes < needed_bytes) continue;
      chosen_bytes -= one.saved_bytes;
      one = {};
    }
    return;
  }
  std::int64_t fits = family.unit_bytes;
  std::int64_t fails = options_.granule_bytes - 1;
  while (fits - fails > options_.granule_bytes) {
    const std::int64_t middle = fails + (fits - fails) / 2;
    std::int64_t saved = 0;
    for (std::size_t index = 0; index < items_.size(); ++index) {
      if (parts_[index].saved_bytes > 0) saved += part(items_[index], true, middle).saved_bytes;
    }
    (saved >= needed_bytes ? fits : fails) = middle;
  }
  chosen_bytes = 0;
  for (std::size_t index = 0; index < items_.size(); ++index) {
    if (parts_[index].saved_bytes > 0) parts_[index] = part(items_[index], true, fits);
    chosen_bytes += parts_[index].saved_bytes;
  }
  // All parts of the size of `fits` have become smaller at once, or none: now one by one.
  for (std::size_t index = 0; index < items_.size(); ++index) {
    Part& one = parts_[index];
    const bool is_cut = one.saved_bytes > 0 && one.streamed_bytes < items_[index].size_bytes;
    const bool is_spare = chosen_bytes - options_.granule_bytes >= needed_bytes;
    if (!is_cut || !is_spare || one.streamed_bytes <= options_.granule_bytes) continue;
    one.streamed_bytes -= options_.granule_bytes;
    one.saved_bytes -= options_.granule_bytes;
    chosen_bytes -= options_.granule_bytes;
  }
}

void Search::keep() {
  StreamingLayout layout;
  layout.streamed_bytes.resize(weights_.size());
  layout.ring_offset_bytes.resize(weights_.size());
  for (std::size_t order = 0; order < chosen_.size(); ++order) {
    const std::size_t weight = items_[chosen_[order]].weight;
    layout.streamed_bytes[weight] = parts_[chosen_[order]].streamed_bytes;
    layout.ring_offset_bytes[weight] = ring_.offsets_bytes()[order];
    layout.order.push_back(static_cast<std::int64_t>(weight));
  }
  layout.transfers = transfers_;
  layout.ring_bytes = ring_.ring_bytes();
  layout.period_ns = best_ns_;
  found_.best = std::move(layout);
}

void require_valid(std::size_t n_launches, const std::vector<StreamingWeight>& weights,
                   const StreamingOptions& options) {
  if (options.alignment_bytes < 1 || options.granule_bytes < 1 ||
      options.granule_bytes % options.alignment_bytes != 0) {
    throw PlanError("expected an alignment of one byte or more that divides the granule, got " +
                    std::to_string(options.alignment_bytes) + " and " +
                    std::to_string(options.granule_bytes));
  }
  if (!(options.link_bytes_per_second > 0) || !(options.link_overhead_ns >= 0)) {
    throw PlanError("expected a link of some bytes per second and no negative overhead");
  }
  const auto end = static_cast<std::int64_t>(n_launches);
  std::int64_t free_bytes = std::numeric_limits<std::int64_t>::max() / 4;
  for (std::size_t index = 0; index < weights.size(); ++index) {
    const StreamingWeight& one = weights[index];
    const bool in_order = 0 <= one.first_launch && one.first_launch <= one.last_launch;
    if (!one.stays && (!in_order || one.last_launch >= end)) {
      throw PlanError("weight " + std::to_string(index) + " is read by launches " +
                      std::to_string(one.first_launch) + " to " + std::to_string(one.last_launch) +
                      " of " + std::to_string(n_launches));
    }
    if (one.size_bytes < 0 || one.size_bytes > free_bytes - options.granule_bytes) {
      throw PlanError("weight " + std::to_string(index) + " has " + std::to_string(one.size_bytes) +
                      " bytes");
    }
    free_bytes -= one.size_bytes + options.granule_bytes;
  }
}

}  // namespace

StreamingSearch search_streaming(const std::vector<double>& launch_ns,
                                 const std::vector<StreamingWeight>& weights,
                                 const StreamingOptions& options) {
  require_valid(launch_ns.size(), weights, options);
  return Search(launch_ns, weights, options).run();
}

}  // namespace offload
