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
#include "streaming_positions.hpp"
#include "streaming_ring.hpp"

namespace offload {
namespace {

// Of so few weights all sets are tried, and of each all positions in the ring.
constexpr std::size_t kFewItems = PositionSearch::kMostPieces;

// Below a page a weight stays, whatever is searched.
constexpr std::int64_t kSmallestBytes = 4096;

// Series of levels of memory: each saves more than the next one by one part in so many. The second
// leaves less of a budget unused; of the first, what is found at one level is not at one near it.
constexpr std::array<std::int64_t, 2> kLevelShares = {256, 1024};

// The ring, in units of the largest piece. 1 takes turns with the launches that read it, 2 copies
// while they run, more smooth launches of unlike lengths.
constexpr std::array<double, 9> kDepths = {2.0, 1.0, 1.5, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0};

// Pieces smaller than this part of the largest stay: each costs the link's overhead.
constexpr std::array<double, 4> kLeastShares = {0.9, 0.5, 0.1, 0.0};

// Tails that are cut into more pieces than are needed, for those that end the last round.
constexpr int kMostExtra = 2;

// Of sums of times in another order.
constexpr double kRounding = 1e-9;

// The largest pieces that are tried: from the largest weight down by a factor of 2^(1/6).
constexpr int kMostUnits = 96;
constexpr double kUnitsPerHalving = 6.0;

// Weights of one size that are all read by one launch each, or all by several.
struct Kind {
  std::int64_t size_bytes;
  std::int64_t aligned_bytes;
  bool is_long;
  std::int64_t n_items;
};

struct Item {
  std::size_t weight;
  std::size_t kind;
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
  bool opens;  // the first weights of a pass are streamed, as many as one piece holds
  double least_share;
  std::int64_t unit_bytes;
  std::int64_t most_saved_bytes;
};

class Search {
 public:
  Search(const std::vector<double>& launch_ns, const std::vector<StreamingWeight>& weights,
         const StreamingOptions& options);
  StreamingSearch run();

 private:
  void find_idle();
  std::vector<std::int64_t> levels() const;
  void make_families();
  void search_all_sets();
  void search_level(std::int64_t saved_bytes);
  void try_candidate(const Family& family, std::int64_t saved_bytes, double depth, int n_extra);
  bool may_be_best() const;
  void list_pieces();
  void simulate_candidate();
  bool choose(const Family& family, std::int64_t needed_bytes, int n_extra);
  void drop(std::int64_t needed_bytes, std::int64_t chosen_bytes);
  void trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes);
  void offer(double period_ns, const std::vector<std::int64_t>& offsets_bytes);
  void keep(const std::vector<std::int64_t>& offsets_bytes);
  std::int64_t chosen_bytes() const;
  double limit_ns() const;
  double copy_ns_of(std::size_t item) const {
    return options_.link_overhead_ns + bytes_ns(parts_[item].streamed_bytes);
  }
  void add_item(std::size_t weight);
  std::vector<std::int64_t> units() const;
  std::vector<std::int64_t> sizes() const;
  Part part(const Kind& kind, const Family& family) const;
  Part part(const Kind& kind, bool tails, std::int64_t unit_bytes) const;
  const Kind& kind_of(std::size_t item) const { return kinds_[items_[item].kind]; }
  double bytes_ns(std::int64_t bytes) const {
    return static_cast<double>(bytes) / options_.link_bytes_per_second * 1e9;
  }

  const std::vector<double>& launch_ns_;
  const std::vector<StreamingWeight>& weights_;
  const StreamingOptions options_;
  const std::int64_t n_launches_;
  StreamingSimulator simulator_;
  double compute_ns_;
  double idle_ns_ = 0;              // of launches that hide no more copies than the ring holds
  std::int64_t full_bytes_ = 0;     // of memory that holds all weights
  std::int64_t padding_bytes_ = 0;  // of which
  std::vector<Kind> kinds_;
  std::vector<Item> items_;
  std::vector<Family> families_;
  double best_ns_;
  std::int64_t best_bytes_ = std::numeric_limits<std::int64_t>::max();
  StreamingSearch found_;
  // Of the candidate at hand.
  std::vector<Part> kind_parts_;             // by kind, in pieces of the family's unit
  std::vector<std::int64_t> n_chosen_kind_;  // by kind
  std::vector<Part> parts_;                  // by item
  std::vector<std::size_t> chosen_;
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
      compute_ns_(simulator_.period_ns({})),
      best_ns_(options.floor_period_ns) {
  for (std::size_t index = 0; index < weights.size(); ++index) {
    const StreamingWeight& weight = weights[index];
    const std::int64_t aligned_bytes = round_up(weight.size_bytes, options.alignment_bytes);
    full_bytes_ += aligned_bytes;
    padding_bytes_ += aligned_bytes - weight.size_bytes;
    if (!weight.stays && weight.size_bytes >= kSmallestBytes) add_item(index);
  }
  std::stable_sort(items_.begin(), items_.end(), [](const Item& one, const Item& other) {
    return one.first_launch < other.first_launch;
  });
  parts_.resize(items_.size());
  find_idle();
}

// In a run of launches the link writes no byte of the ring twice unless a launch in between,
// neither the first nor the last, reads what was written. So it copies no more than the ring and
// what those read, and all else that a pass copies is copied outside of the run: no pass is shorter
// than the run and what is copied beyond the ring, less what is read in between. Finds the longest
// such run.
void Search::find_idle() {
  std::vector<double> read_ns(launch_ns_.size());
  for (const Item& item : items_) {
    read_ns[static_cast<std::size_t>(item.last_launch)] += bytes_ns(kinds_[item.kind].size_bytes);
  }
  double before_ns = 0;  // of the best run that the launch may end
  for (std::size_t launch = 0; launch < launch_ns_.size(); ++launch) {
    const double ns = launch_ns_[launch];
    idle_ns_ = std::max(idle_ns_, before_ns + ns);
    before_ns = std::max(ns, before_ns + ns - read_ns[launch]);
  }
}

void Search::add_item(std::size_t index) {
  const StreamingWeight& weight = weights_[index];
  const bool is_long = weight.last_launch > weight.first_launch;
  const auto found = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& kind) {
    return kind.size_bytes == weight.size_bytes && kind.is_long == is_long;
  });
  items_.push_back({index, static_cast<std::size_t>(found - kinds_.begin()), weight.first_launch,
                    weight.last_launch});
  if (found == kinds_.end()) {
    const std::int64_t aligned_bytes = round_up(weight.size_bytes, options_.alignment_bytes);
    kinds_.push_back({weight.size_bytes, aligned_bytes, is_long, 0});
  }
  ++kinds_[items_.back().kind].n_items;
}

Part Search::part(const Kind& kind, bool tails, std::int64_t unit_bytes) const {
  if (kind.size_bytes <= unit_bytes) return {kind.size_bytes, kind.aligned_bytes};
  if (!tails) return {};
  const std::int64_t resident_bytes =
      round_up(kind.size_bytes - unit_bytes, options_.granule_bytes);
  if (resident_bytes >= kind.size_bytes) return {};
  return {kind.size_bytes - resident_bytes, kind.aligned_bytes - resident_bytes};
}

Part Search::part(const Kind& kind, const Family& family) const {
  if (kind.is_long && !family.long_spans) return {};
  const Part found = part(kind, family.tails, family.unit_bytes);
  const double least = family.least_share * static_cast<double>(family.unit_bytes);
  return static_cast<double>(found.streamed_bytes) < least ? Part{} : found;
}

// The sizes of weights, from the largest down; of very many only some.
std::vector<std::int64_t> Search::sizes() const {
  std::vector<std::int64_t> all;
  for (const Kind& kind : kinds_) all.push_back(kind.size_bytes);
  std::sort(all.begin(), all.end(), std::greater<>());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  const std::size_t stride = 1 + (all.size() - 1) / kMostUnits;
  std::vector<std::int64_t> tried;
  for (std::size_t index = 0; index < all.size(); index += stride) tried.push_back(all[index]);
  return tried;
}

// Multiples of the granule, from the largest weight's down.
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
  const bool has_long =
      std::any_of(kinds_.begin(), kinds_.end(), [](const Kind& kind) { return kind.is_long; });
  for (const bool long_spans : {false, true}) {
    if (long_spans && !has_long) continue;
    for (const bool tails : {false, true}) {
      if (tails && !options_.tails) continue;
      for (const double least_share : kLeastShares) {
        for (const std::int64_t unit : tails ? units() : sizes()) {
          Family family{tails, long_spans, false, least_share, unit, 0};
          for (const Kind& kind : kinds_) {
            family.most_saved_bytes += kind.n_items * part(kind, family).saved_bytes;
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

// The levels that the budget admits, by what each saves against holding all weights, ascending.
std::vector<std::int64_t> Search::levels() const {
  std::vector<std::int64_t> all;
  const std::int64_t least_saved = full_bytes_ - options_.budget_bytes;
  for (const std::int64_t share : kLevelShares) {
    for (std::int64_t saved = full_bytes_ - options_.floor_bytes; saved >= least_saved && saved > 0;
         saved -= std::max(options_.alignment_bytes, saved / share)) {
      all.push_back(saved);
    }
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

StreamingSearch Search::run() {
  if (items_.empty()) return std::move(found_);
  if (items_.size() <= kFewItems) search_all_sets();
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
  for (std::uint32_t set = 1; set < 1u << items_.size(); ++set) {
    chosen_.clear();
    copy_ns.clear();
    std::int64_t saved_bytes = 0;
    for (std::size_t index = 0; index < items_.size(); ++index) {
      if (((set >> index) & 1u) == 0) continue;
      parts_[index] = {kind_of(index).size_bytes, kind_of(index).aligned_bytes};
      saved_bytes += parts_[index].saved_bytes;
      chosen_.push_back(index);
      copy_ns.push_back(copy_ns_of(index));
    }
    if (!may_be_best()) continue;
    list_pieces();
    const std::int64_t capacity_bytes = options_.budget_bytes - (full_bytes_ - saved_bytes);
    const auto found = positions.quickest(pieces_, copy_ns, capacity_bytes, limit_ns());
    found_.n_candidates += positions.n_simulated();
    if (!found) continue;
    const std::vector<std::size_t> chosen = chosen_;
    for (std::size_t order = 0; order < chosen.size(); ++order) {
      chosen_[order] = chosen[found->order[order]];
    }
    list_pieces();
    transfers_ = found->transfers;
    offer(found->period_ns, found->offsets_bytes);
  }
}

// What a plan of what is chosen has to be quicker than to be the best.
double Search::limit_ns() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (best_ns_ <= compute_ns_) return std::nextafter(compute_ns_ * (1 + kRounding), kInfinity);
  return chosen_bytes() < best_bytes_ ? std::nextafter(best_ns_, kInfinity) : best_ns_;
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
  if (!choose(family, needed_bytes, n_extra) || !may_be_best()) return;
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
    const bool whole = parts_[index].streamed_bytes == kind_of(index).size_bytes;
    const std::int64_t unit = whole ? options_.alignment_bytes : options_.granule_bytes;
    pieces_.push_back(
        {round_up(parts_[index].streamed_bytes, unit), unit, item.first_launch, item.last_launch});
  }
}

// Whether what is chosen may be the best: no pass is shorter than its copies.
bool Search::may_be_best() const {
  double copies_ns = static_cast<double>(chosen_.size()) * options_.link_overhead_ns;
  const std::int64_t bytes = chosen_bytes();
  copies_ns += bytes_ns(bytes);
  return best_ns_ <= compute_ns_ ? bytes < best_bytes_ : copies_ns <= best_ns_ * (1 + kRounding);
}

void Search::simulate_candidate() {
  transfers_.clear();
  for (std::size_t order = 0; order < chosen_.size(); ++order) {
    transfers_.push_back(
        {copy_ns_of(chosen_[order]), pieces_[order].first_launch, ring_.after_steps()[order]});
  }
  ++found_.n_candidates;
  offer(simulator_.period_ns(transfers_), ring_.offsets_bytes());
}

// Takes the candidate at hand if it is the best so far.
void Search::offer(double period_ns, const std::vector<std::int64_t>& offsets_bytes) {
  if (period_ns <= compute_ns_ * (1 + kRounding)) period_ns = compute_ns_;
  const std::int64_t bytes = chosen_bytes();
  if (period_ns < best_ns_ || (period_ns <= best_ns_ && bytes < best_bytes_)) {
    best_ns_ = period_ns;
    best_bytes_ = bytes;
    keep(offsets_bytes);
  }
}

std::int64_t Search::chosen_bytes() const {
  std::int64_t bytes = 0;
  for (const std::size_t index : chosen_) bytes += parts_[index].streamed_bytes;
  return bytes;
}

// Chooses items whose parts save enough, spread evenly over what the family could stream.
bool Search::choose(const Family& family, std::int64_t needed_bytes, int n_extra) {
  const double rate = static_cast<double>(needed_bytes + n_extra * family.unit_bytes) /
                      static_cast<double>(family.most_saved_bytes);
  if (rate > 1) return false;
  kind_parts_.clear();
  for (const Kind& kind : kinds_) kind_parts_.push_back(part(kind, family));
  std::int64_t chosen_bytes = 0;
  double due_bytes = 0;
  for (std::size_t index = 0; index < items_.size(); ++index) {
    const Part& found = kind_parts_[items_[index].kind];
    const auto saved_bytes = static_cast<double>(found.saved_bytes);
    parts_[index] = {};
    if (family.opens && chosen_bytes < family.unit_bytes) {
      Family any = family;
      any.least_share = 0;
      parts_[index] = part(kind_of(index), any);
      chosen_bytes += parts_[index].saved_bytes;
      continue;
    }
    due_bytes += rate * saved_bytes;
    if (found.saved_bytes == 0 || due_bytes < 0.5 * saved_bytes) continue;
    due_bytes -= saved_bytes;
    parts_[index] = found;
    chosen_bytes += found.saved_bytes;
  }
  for (std::size_t index = 0; index < items_.size() && chosen_bytes < needed_bytes; ++index) {
    if (parts_[index].saved_bytes > 0) continue;
    parts_[index] = kind_parts_[items_[index].kind];
    chosen_bytes += parts_[index].saved_bytes;
  }
  if (chosen_bytes < needed_bytes) return false;
  if (family.tails) {
    trim(family, needed_bytes, chosen_bytes);
  } else {
    drop(needed_bytes, chosen_bytes);
  }
  chosen_.clear();
  for (std::size_t index = 0; index < items_.size(); ++index) {
    if (parts_[index].saved_bytes > 0) chosen_.push_back(index);
  }
  return true;
}

// Gives back whole items that are not needed.
void Search::drop(std::int64_t needed_bytes, std::int64_t chosen_bytes) {
  for (Part& one : parts_) {
    if (one.saved_bytes == 0 || chosen_bytes - one.saved_bytes < needed_bytes) continue;
    chosen_bytes -= one.saved_bytes;
    one = {};
  }
}

// Gives back what is not needed of the largest parts: all of one size at once, then one by one.
void Search::trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes) {
  const std::int64_t granule = options_.granule_bytes;
  if (chosen_bytes - needed_bytes < granule) return;
  n_chosen_kind_.assign(kinds_.size(), 0);
  for (std::size_t index = 0; index < items_.size(); ++index) {
    n_chosen_kind_[items_[index].kind] += parts_[index].saved_bytes > 0 ? 1 : 0;
  }
  std::int64_t fits = family.unit_bytes;
  std::int64_t fails = granule - 1;
  while (fits - fails > granule) {
    const std::int64_t middle = fails + (fits - fails) / 2;
    std::int64_t saved = 0;
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (n_chosen_kind_[kind] == 0) continue;
      saved += n_chosen_kind_[kind] * part(kinds_[kind], true, middle).saved_bytes;
    }
    (saved >= needed_bytes ? fits : fails) = middle;
  }
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    kind_parts_[kind] = part(kinds_[kind], true, fits);
  }
  chosen_bytes = 0;
  for (std::size_t index = 0; index < items_.size(); ++index) {
    if (parts_[index].saved_bytes > 0) parts_[index] = kind_parts_[items_[index].kind];
    chosen_bytes += parts_[index].saved_bytes;
  }
  for (std::size_t index = 0; index < items_.size(); ++index) {
    if (chosen_bytes - granule < needed_bytes) break;
    Part& one = parts_[index];
    const bool is_cut = one.saved_bytes > 0 && one.streamed_bytes < kind_of(index).size_bytes;
    if (!is_cut || one.streamed_bytes <= granule) continue;
    one.streamed_bytes -= granule;
    one.saved_bytes -= granule;
    chosen_bytes -= granule;
  }
}

void Search::keep(const std::vector<std::int64_t>& offsets_bytes) {
  StreamingLayout layout;
  layout.streamed_bytes.resize(weights_.size());
  layout.ring_offset_bytes.resize(weights_.size());
  for (std::size_t order = 0; order < chosen_.size(); ++order) {
    const std::size_t weight = items_[chosen_[order]].weight;
    layout.streamed_bytes[weight] = parts_[chosen_[order]].streamed_bytes;
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
