#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "offload/streaming.hpp"
#include "streaming_choice.hpp"
#include "streaming_positions.hpp"
#include "streaming_ring.hpp"

namespace offload {
namespace {

// Up to this number of weights, all sets are tried, each with all positions in the ring.
constexpr std::size_t kFewItems = PositionSearch::kMostPieces;

// Smaller weights (below a page) always stay resident.
constexpr std::int64_t kSmallestBytes = 4096;

// Series of levels of memory: each saves one part in this many more than the next. The second
// leaves less of a budget unused; levels of the first find plans that levels near them do not.
constexpr std::array<std::int64_t, 2> kLevelShares = {256, 1024};

// The more weights are read by several launches, the fewer candidates fit, and no result ends the
// search early. The number of levels is then reduced, down to a least series, to limit the visits
// to weights and launches to this number (some seconds at worst). The number of levels does not
// depend on the budget either.
constexpr double kMostLooks = 1e9;
constexpr std::int64_t kLeastShare = 8;

// Ring sizes in units of the largest piece. 1 alternates with the launches that read it, 2 copies
// while they run, more evens out launches of different durations.
constexpr std::array<double, 9> kDepths = {2.0, 1.0, 1.5, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0};

// Pieces below this share of the largest stay resident: each costs the link's overhead.
constexpr std::array<double, 4> kLeastShares = {0.9, 0.5, 0.1, 0.0};

// Tails are cut into this many more pieces than needed, for pieces that end the last round.
constexpr int kMostExtra = 2;

// Rounding of sums of times in another order.
constexpr double kRounding = 1e-9;

// The largest pieces that are tried: from the largest weight down, by a factor of 2^(1/6).
constexpr int kMostUnits = 96;
constexpr double kUnitsPerHalving = 6.0;

class Search {
 public:
  Search(const std::vector<double>& launch_ns, const std::vector<StreamingWeight>& weights,
         const StreamingOptions& options);
  StreamingSearch run();

 private:
  void find_idle();
  std::vector<std::int64_t> levels() const;
  std::int64_t thinning() const;
  void list_levels(std::int64_t least_saved, std::int64_t thinning,
                   std::vector<std::int64_t>& all) const;
  void make_families();
  void search_all_sets();
  void search_level(std::int64_t saved_bytes);
  void try_candidate(const Family& family, std::int64_t saved_bytes, double depth, int n_extra);
  bool may_be_best() const;
  void list_pieces();
  void simulate_candidate();
  void offer(double period_ns, const std::vector<std::int64_t>& offsets_bytes);
  void keep(const std::vector<std::int64_t>& offsets_bytes);
  double limit_ns() const;
  double copy_ns_of(std::size_t item) const {
    return options_.link_overhead_ns + bytes_ns(choice_.parts[item].streamed_bytes);
  }
  std::vector<std::int64_t> units() const;
  std::vector<std::int64_t> sizes() const;
  double bytes_ns(std::int64_t bytes) const {
    return static_cast<double>(bytes) / options_.link_bytes_per_second * 1e9;
  }

  const std::vector<double>& launch_ns_;
  const std::vector<StreamingWeight>& weights_;
  const StreamingOptions options_;
  const std::int64_t n_launches_;
  StreamingSimulator simulator_;
  PieceChoice choice_;
  double compute_ns_;
  double idle_ns_ = 0;              // of launches that hide no more copies than the ring holds
  std::int64_t full_bytes_ = 0;     // of memory that holds all weights
  std::int64_t padding_bytes_ = 0;  // part of full_bytes_
  std::vector<Family> families_;
  double best_ns_;
  std::int64_t best_bytes_ = std::numeric_limits<std::int64_t>::max();
  StreamingSearch found_;
  // Of the current candidate.
  std::vector<RingPiece> pieces_;
  std::vector<StreamingTransfer> transfers_;
  RingLayout ring_;
};

Search::Search(const std::vector<double>& launch_ns, const std::vector<StreamingWeight>& weights,
               const StreamingOptions& options)
    : launch_ns_(launch_ns),
      weights_(weights),
      options_(options),
      n_launches_(static_cast<std::int64_t>(launch_ns.size())),
      simulator_(launch_ns),
      choice_(options.alignment_bytes, options.granule_bytes),
      compute_ns_(simulator_.period_ns({})),
      best_ns_(options.floor_period_ns) {
  for (std::size_t index = 0; index < weights.size(); ++index) {
    const StreamingWeight& weight = weights[index];
    const std::int64_t aligned_bytes = round_up(weight.size_bytes, options.alignment_bytes);
    full_bytes_ += aligned_bytes;
    padding_bytes_ += aligned_bytes - weight.size_bytes;
    if (!weight.stays && weight.size_bytes >= kSmallestBytes) choice_.add(index, weight);
  }
  choice_.order();
  find_idle();
}

// During a run of launches the link writes no byte of the ring twice, unless a launch in between
// (neither the first nor the last) reads what was written. The run therefore hides no more copies
// than the ring and what those launches read; all other copies of a pass are made outside the run.
// No pass is shorter than the run plus the copies beyond the ring, less what is read in between.
// Finds the longest such run.
void Search::find_idle() {
  std::vector<double> read_ns(launch_ns_.size());
  for (const Item& item : choice_.items) {
    read_ns[static_cast<std::size_t>(item.last_launch)] +=
        bytes_ns(choice_.kinds[item.kind].size_bytes);
  }
  double before_ns = 0;  // of the best run that this launch may end
  for (std::size_t launch = 0; launch < launch_ns_.size(); ++launch) {
    const double ns = launch_ns_[launch];
    idle_ns_ = std::max(idle_ns_, before_ns + ns);
    before_ns = std::max(ns, before_ns + ns - read_ns[launch]);
  }
}

// The sizes of weights in descending order; a selection if there are very many.
std::vector<std::int64_t> Search::sizes() const {
  std::vector<std::int64_t> all;
  for (const Kind& kind : choice_.kinds) all.push_back(kind.size_bytes);
  std::sort(all.begin(), all.end(), std::greater<>());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  const std::size_t stride = 1 + (all.size() - 1) / kMostUnits;
  std::vector<std::int64_t> tried;
  for (std::size_t index = 0; index < all.size(); index += stride) tried.push_back(all[index]);
  return tried;
}

// Multiples of the granule, descending from the size of the largest weight.
std::vector<std::int64_t> Search::units() const {
  const auto largest = static_cast<double>(sizes().front());
  std::vector<std::int64_t> tried;
  for (int step = 0; step < kMostUnits; ++step) {
    const double unit = largest * std::exp2(-step / kUnitsPerHalving);
    const std::int64_t rounded = round_up(static_cast<std::int64_t>(unit), options_.granule_bytes);
    if (tried.empty() || rounded < tried.back()) tried.push_back(rounded);
  }
  return tried;
}

void Search::make_families() {
  const bool has_long = std::any_of(choice_.kinds.begin(), choice_.kinds.end(),
                                    [](const Kind& kind) { return kind.is_long; });
  for (const bool long_spans : {false, true}) {
    if (long_spans && !has_long) continue;
    for (const bool tails : {false, true}) {
      if (tails && !options_.tails) continue;
      for (const double least_share : kLeastShares) {
        for (const std::int64_t unit : tails ? units() : sizes()) {
          Family family{tails, long_spans, false, least_share, unit, 0};
          for (const Kind& kind : choice_.kinds) {
            family.most_saved_bytes += kind.n_items * choice_.part(kind, family).saved_bytes;
          }
          if (family.most_saved_bytes > 0) families_.push_back(family);
          // After the end of a pass, which is often its longest launch, these free the ring first.
          family.opens = true;
          if (family.most_saved_bytes > 0 && least_share > 0) families_.push_back(family);
        }
      }
    }
  }
}

// The levels that the budget admits, as bytes saved against holding all weights, ascending.
std::vector<std::int64_t> Search::levels() const {
  std::vector<std::int64_t> all;
  list_levels(full_bytes_ - options_.budget_bytes, thinning(), all);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

void Search::list_levels(std::int64_t least_saved, std::int64_t thinning,
                         std::vector<std::int64_t>& all) const {
  for (const std::int64_t share : kLevelShares) {
    const std::int64_t thinned = std::max(kLeastShare, share / thinning);
    for (std::int64_t saved = full_bytes_ - options_.floor_bytes; saved >= least_saved && saved > 0;
         saved -= std::max(options_.alignment_bytes, saved / thinned)) {
      all.push_back(saved);
    }
  }
}

// The factor by which levels are fewer than where each weight is read once.
std::int64_t Search::thinning() const {
  const auto n_long = static_cast<double>(
      std::count_if(choice_.items.begin(), choice_.items.end(),
                    [&](const Item& item) { return choice_.kinds[item.kind].is_long; }));
  std::size_t n_depths = 0;
  for (const Family& family : families_) {
    n_depths += kDepths.size() * (family.tails ? kMostExtra + 1 : 1);
  }
  const auto n_items = static_cast<double>(choice_.items.size());
  const double looks = static_cast<double>(n_depths) * n_long / n_items *
                       (n_items + static_cast<double>(launch_ns_.size()));
  std::int64_t thinning = 1;
  for (; thinning < kLevelShares.back(); thinning *= 2) {
    std::vector<std::int64_t> all;
    list_levels(1, thinning, all);
    if (static_cast<double>(all.size()) * looks <= kMostLooks) break;
  }
  return thinning;
}

StreamingSearch Search::run() {
  if (choice_.items.empty()) return std::move(found_);
  if (choice_.items.size() <= kFewItems) search_all_sets();
  make_families();
  for (const std::int64_t saved_bytes : levels()) {
    const double bound_ns =
        std::max(compute_ns_, idle_ns_ + bytes_ns(saved_bytes - padding_bytes_));
    if (bound_ns * (1 - kRounding) >= best_ns_) break;
    search_level(saved_bytes);
  }
  return std::move(found_);
}

void Search::search_all_sets() {
  PositionSearch positions(launch_ns_);
  std::vector<double> copy_ns;
  for (std::uint32_t set = 1; set < 1u << choice_.items.size(); ++set) {
    choice_.chosen.clear();
    copy_ns.clear();
    std::int64_t saved_bytes = 0;
    for (std::size_t index = 0; index < choice_.items.size(); ++index) {
      if (((set >> index) & 1u) == 0) continue;
      choice_.parts[index] = {choice_.kind_of(index).size_bytes,
                              choice_.kind_of(index).aligned_bytes};
      saved_bytes += choice_.parts[index].saved_bytes;
      choice_.chosen.push_back(index);
      copy_ns.push_back(copy_ns_of(index));
    }
    if (!may_be_best()) continue;
    list_pieces();
    const std::int64_t capacity_bytes = options_.budget_bytes - (full_bytes_ - saved_bytes);
    const auto found = positions.quickest(pieces_, copy_ns, capacity_bytes, limit_ns());
    found_.n_candidates += positions.n_simulated();
    if (!found) continue;
    const std::vector<std::size_t> chosen = choice_.chosen;
    for (std::size_t order = 0; order < chosen.size(); ++order) {
      choice_.chosen[order] = chosen[found->order[order]];
    }
    list_pieces();
    transfers_ = found->transfers;
    offer(found->period_ns, found->offsets_bytes);
  }
}

// A plan of the chosen items must be quicker than this to be the best.
double Search::limit_ns() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (best_ns_ <= compute_ns_) return std::nextafter(compute_ns_ * (1 + kRounding), kInfinity);
  return choice_.chosen_bytes() < best_bytes_ ? std::nextafter(best_ns_, kInfinity) : best_ns_;
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
  // Of plans that take no longer than computing, the one that copies least is best.
  const bool is_hidden = best_ns_ <= compute_ns_;
  if (is_hidden ? needed_bytes - padding_bytes_ >= best_bytes_ : bound_ns >= best_ns_) return;
  if (!choice_.choose(family, needed_bytes, n_extra) || !may_be_best()) return;
  list_pieces();
  for (const bool slots : {true, false}) {
    if (ring_.lay(pieces_, n_launches_, capacity_bytes, options_.alignment_bytes, slots)) {
      simulate_candidate();
    }
  }
}

void Search::list_pieces() {
  pieces_.clear();
  for (const std::size_t index : choice_.chosen) {
    const Item& item = choice_.items[index];
    const bool whole = choice_.parts[index].streamed_bytes == choice_.kind_of(index).size_bytes;
    const std::int64_t unit = whole ? options_.alignment_bytes : options_.granule_bytes;
    pieces_.push_back({round_up(choice_.parts[index].streamed_bytes, unit), unit, item.first_launch,
                       item.last_launch});
  }
}

// Whether the chosen items may give the best plan: no pass is shorter than its copies.
bool Search::may_be_best() const {
  double copies_ns = static_cast<double>(choice_.chosen.size()) * options_.link_overhead_ns;
  const std::int64_t bytes = choice_.chosen_bytes();
  copies_ns += bytes_ns(bytes);
  return best_ns_ <= compute_ns_ ? bytes < best_bytes_ : copies_ns <= best_ns_ * (1 + kRounding);
}

void Search::simulate_candidate() {
  transfers_.clear();
  for (std::size_t order = 0; order < choice_.chosen.size(); ++order) {
    transfers_.push_back({copy_ns_of(choice_.chosen[order]), pieces_[order].first_launch,
                          ring_.after_steps()[order]});
  }
  ++found_.n_candidates;
  offer(simulator_.period_ns(transfers_), ring_.offsets_bytes());
}

// Keeps the current candidate if it is the best so far.
void Search::offer(double period_ns, const std::vector<std::int64_t>& offsets_bytes) {
  if (period_ns <= compute_ns_ * (1 + kRounding)) period_ns = compute_ns_;
  const std::int64_t bytes = choice_.chosen_bytes();
  if (period_ns < best_ns_ || (period_ns <= best_ns_ && bytes < best_bytes_)) {
    best_ns_ = period_ns;
    best_bytes_ = bytes;
    keep(offsets_bytes);
  }
}

void Search::keep(const std::vector<std::int64_t>& offsets_bytes) {
  StreamingLayout layout;
  layout.streamed_bytes.resize(weights_.size());
  layout.ring_offset_bytes.resize(weights_.size());
  for (std::size_t order = 0; order < choice_.chosen.size(); ++order) {
    const std::size_t weight = choice_.items[choice_.chosen[order]].weight;
    layout.streamed_bytes[weight] = choice_.parts[choice_.chosen[order]].streamed_bytes;
    layout.ring_offset_bytes[weight] = offsets_bytes[order];
    layout.ring_bytes =
        std::max(layout.ring_bytes, offsets_bytes[order] + pieces_[order].size_bytes);
    layout.order.push_back(static_cast<std::int64_t>(weight));
  }
  layout.transfers = transfers_;
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
    throw PlanError(
        "expected a link of more than 0 bytes per second, and an overhead of at least 0 ns");
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
