#include "offload/placement.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "offload/errors.hpp"
#include "placement_search.hpp"

namespace offload {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

// With more pairs of items that are live at once, lists of them would take too much memory.
constexpr std::int64_t kMaxConflicts = 4'000'000;

// No further greedy order is tried after this many visits to placed items (some 0.1 s).
constexpr std::int64_t kGreedyVisits = 30'000'000;

// The search's tables take 10 to 100 bytes for each section of each item.
constexpr std::int64_t kMaxCrossings = 4'000'000;

std::string describe(const std::vector<Interval>& intervals, std::size_t index) {
  const Interval& interval = intervals[index];
  return "interval " + std::to_string(index) + " of " + std::to_string(interval.size_bytes) +
         " bytes in steps [" + std::to_string(interval.first) + ", " +
         std::to_string(interval.last) + ")";
}

std::string describe(const std::vector<Interval>& intervals,
                     const std::vector<std::int64_t>& offsets_bytes, std::size_t index) {
  return describe(intervals, index) + " at offset " + std::to_string(offsets_bytes[index]);
}

bool takes_memory(const Interval& interval) {
  return interval.first < interval.last && interval.size_bytes > 0;
}

void require_valid(const std::vector<Interval>& intervals, std::int64_t alignment_bytes) {
  if (alignment_bytes < 1 || (alignment_bytes & (alignment_bytes - 1)) != 0) {
    throw PlanError("alignment_bytes must be a power of two, got " +
                    std::to_string(alignment_bytes));
  }
  std::int64_t free_bytes = kMaxBytes;
  for (std::size_t index = 0; index < intervals.size(); ++index) {
    const Interval& interval = intervals[index];
    if (interval.last < interval.first) {
      throw PlanError(describe(intervals, index) + " ends before it begins");
    }
    if (interval.size_bytes < 0) throw PlanError(describe(intervals, index) + " has negative size");
    const std::int64_t excess_bytes = interval.size_bytes % alignment_bytes;
    const std::int64_t padding_bytes = excess_bytes == 0 ? 0 : alignment_bytes - excess_bytes;
    if (interval.size_bytes > free_bytes - padding_bytes) {
      throw PlanError("the aligned sizes add up to more than 2^63 - 1 bytes at " +
                      describe(intervals, index));
    }
    free_bytes -= interval.size_bytes + padding_bytes;
  }
}

void require_offsets(const std::vector<Interval>& intervals,
                     const std::vector<std::int64_t>& offsets_bytes) {
  if (offsets_bytes.size() != intervals.size()) {
    throw PlanError("expected an offset for each of " + std::to_string(intervals.size()) +
                    " intervals, got " + std::to_string(offsets_bytes.size()));
  }
  for (std::size_t index = 0; index < intervals.size(); ++index) {
    const std::int64_t highest = kMaxBytes - intervals[index].size_bytes;
    if (offsets_bytes[index] < 0 || offsets_bytes[index] > highest) {
      throw PlanError(describe(intervals, offsets_bytes, index) + " lies outside of [0, 2^63 - 1]");
    }
  }
}

// The beginning or end of an interval that takes memory.
struct Event {
  std::int64_t step;
  bool begins;
  std::size_t interval;
};

// In order of time; within a step, ends come first.
std::vector<Event> events_of(const std::vector<Interval>& intervals) {
  std::vector<Event> events;
  for (std::size_t index = 0; index < intervals.size(); ++index) {
    if (!takes_memory(intervals[index])) continue;
    events.push_back({intervals[index].first, true, index});
    events.push_back({intervals[index].last, false, index});
  }
  std::sort(events.begin(), events.end(), [](const Event& one, const Event& other) {
    return std::tie(one.step, one.begins, one.interval) <
           std::tie(other.step, other.begins, other.interval);
  });
  return events;
}

// The intervals that take memory, in the form of the search.
struct Problem {
  std::vector<std::size_t> intervals;  // of each item
  std::vector<SectionItem> items;
  std::size_t n_sections = 0;
  std::int64_t unit_bytes = 1;
  std::int64_t lower_bound = 0;
};

// A section ends at the first end of an item after the beginning of another.
void assign_sections(const std::vector<Interval>& intervals, Problem& problem) {
  std::vector<std::size_t> item_of(intervals.size());
  for (std::size_t item = 0; item < problem.items.size(); ++item) {
    item_of[problem.intervals[item]] = item;
  }
  bool has_begun = false;
  for (const Event& event : events_of(intervals)) {
    SectionItem& item = problem.items[item_of[event.interval]];
    if (event.begins) {
      item.first = problem.n_sections;
    } else {
      problem.n_sections += has_begun ? 1 : 0;
      item.last = problem.n_sections;
    }
    has_begun = event.begins;
  }
}

Problem make_problem(const std::vector<Interval>& intervals, std::int64_t alignment_bytes) {
  require_valid(intervals, alignment_bytes);
  Problem problem;
  std::int64_t unit_bytes = 0;
  for (std::size_t index = 0; index < intervals.size(); ++index) {
    if (!takes_memory(intervals[index])) continue;
    const std::int64_t aligned_bytes =
        ((intervals[index].size_bytes - 1) / alignment_bytes + 1) * alignment_bytes;
    problem.intervals.push_back(index);
    problem.items.push_back({0, 0, aligned_bytes});
    unit_bytes = std::gcd(unit_bytes, aligned_bytes);
  }
  if (problem.items.empty()) return problem;
  problem.unit_bytes = unit_bytes;
  for (SectionItem& item : problem.items) item.size /= unit_bytes;
  assign_sections(intervals, problem);
  const std::vector<std::int64_t> loads = section_loads(problem.items, problem.n_sections);
  problem.lower_bound = *std::max_element(loads.begin(), loads.end());
  return problem;
}

// --- greedy ---

enum class Fit { kFirst, kBest };

// Places items one by one into gaps between those already placed.
//
// Source of the orders by size and by breadth: Pisarchyk and Lee, "Efficient Memory Management for
// Deep Neural Net Inference", arXiv 2001.03288.
class GreedyPlacer {
 public:
  explicit GreedyPlacer(const std::vector<SectionItem>& items);

  // Places the items in this order and returns their offsets.
  const std::vector<std::int64_t>& place(const std::vector<std::size_t>& order, Fit fit);

  // Visits to placed items since construction.
  std::int64_t visits() const noexcept { return visits_; }

 private:
  static constexpr std::int64_t kUnplaced = -1;

  void list_conflicts();
  const std::vector<std::size_t>& placed_conflicts(std::size_t item);
  std::int64_t find_gap(std::size_t item, const std::vector<std::size_t>& others, Fit fit);
  bool is_below(std::size_t one, std::size_t other) const {
    return std::tie(offsets_[one], one) < std::tie(offsets_[other], other);
  }

  const std::vector<SectionItem>& items_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::vector<std::size_t>> conflicts_;  // of each item; empty if too many
  std::vector<std::size_t> placed_;                  // in ascending offset
  std::int64_t visits_ = 0;
};

GreedyPlacer::GreedyPlacer(const std::vector<SectionItem>& items) : items_(items) {
  std::int64_t n_conflicts = 0;
  std::vector<std::size_t> firsts, lasts;
  for (const SectionItem& item : items_) {
    firsts.push_back(item.first);
    lasts.push_back(item.last);
  }
  std::sort(firsts.begin(), firsts.end());
  std::sort(lasts.begin(), lasts.end());
  for (const SectionItem& item : items_) {
    const auto began = std::lower_bound(firsts.begin(), firsts.end(), item.last) - firsts.begin();
    const auto ended = std::upper_bound(lasts.begin(), lasts.end(), item.first) - lasts.begin();
    n_conflicts += began - ended - 1;
  }
  if (n_conflicts <= kMaxConflicts) list_conflicts();
}

void GreedyPlacer::list_conflicts() {
  conflicts_.resize(items_.size());
  std::vector<std::size_t> by_first(items_.size());
  std::iota(by_first.begin(), by_first.end(), std::size_t{0});
  std::stable_sort(by_first.begin(), by_first.end(), [this](std::size_t one, std::size_t other) {
    return items_[one].first < items_[other].first;
  });
  std::vector<std::size_t> live;
  for (const std::size_t item : by_first) {
    live.erase(
        std::remove_if(live.begin(), live.end(),
                       [&](std::size_t other) { return items_[other].last <= items_[item].first; }),
        live.end());
    for (const std::size_t other : live) {
      conflicts_[item].push_back(other);
      conflicts_[other].push_back(item);
    }
    live.push_back(item);
  }
}

const std::vector<std::int64_t>& GreedyPlacer::place(const std::vector<std::size_t>& order,
                                                     Fit fit) {
  offsets_.assign(items_.size(), kUnplaced);
  placed_.clear();
  for (const std::size_t item : order) {
    if (!conflicts_.empty()) {
      offsets_[item] = find_gap(item, placed_conflicts(item), fit);
    } else {
      offsets_[item] = find_gap(item, placed_, fit);
      const auto above = std::upper_bound(
          placed_.begin(), placed_.end(), item,
          [this](std::size_t one, std::size_t other) { return is_below(one, other); });
      placed_.insert(above, item);
    }
  }
  return offsets_;
}

const std::vector<std::size_t>& GreedyPlacer::placed_conflicts(std::size_t item) {
  placed_.clear();
  for (const std::size_t other : conflicts_[item]) {
    if (offsets_[other] != kUnplaced) placed_.push_back(other);
  }
  visits_ += static_cast<std::int64_t>(conflicts_[item].size());
  std::sort(placed_.begin(), placed_.end(),
            [this](std::size_t one, std::size_t other) { return is_below(one, other); });
  return placed_;
}

std::int64_t GreedyPlacer::find_gap(std::size_t index, const std::vector<std::size_t>& others,
                                    Fit fit) {
  const SectionItem& item = items_[index];
  std::int64_t end = 0;
  std::int64_t best_gap = kMaxBytes;
  std::int64_t best_offset = kUnplaced;
  for (const std::size_t other : others) {
    ++visits_;
    if (items_[other].last <= item.first || item.last <= items_[other].first) continue;
    const std::int64_t gap = offsets_[other] - end;
    if (gap >= item.size && gap < best_gap) {
      best_gap = gap;
      best_offset = end;
      if (fit == Fit::kFirst) break;
    }
    end = std::max(end, offsets_[other] + items_[other].size);
  }
  return best_offset == kUnplaced ? end : best_offset;
}

// --- the portfolio and the search ---

struct Solution {
  std::vector<std::int64_t> offsets;
  std::int64_t arena = kMaxBytes;
  std::string method;
};

void keep_if_smaller(const Problem& problem, const std::vector<std::int64_t>& offsets,
                     const char* method, Solution& best) {
  std::int64_t arena = 0;
  for (std::size_t item = 0; item < offsets.size(); ++item) {
    arena = std::max(arena, offsets[item] + problem.items[item].size);
  }
  if (arena < best.arena) best = {offsets, arena, method};
}

// Items by descending key, then by descending size, then in the given order.
std::vector<std::size_t> order_by(const Problem& problem, const std::vector<double>& keys) {
  std::vector<std::size_t> order(problem.items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t one, std::size_t other) {
    return std::tie(keys[one], problem.items[one].size) >
           std::tie(keys[other], problem.items[other].size);
  });
  return order;
}

// Keeps the best of the greedy placements; stops at one that reaches the target.
Solution place_greedily(const Problem& problem, std::int64_t target) {
  const std::vector<std::int64_t> peaks =
      peak_loads(problem.items, section_loads(problem.items, problem.n_sections));
  using Key = double (*)(const SectionItem&, double peak);
  const Key size = [](const SectionItem& item, double) { return double(item.size); };
  const Key area = [](const SectionItem& item, double) {
    return double(item.size) * double(item.last - item.first);
  };
  const Key duration = [](const SectionItem& item, double) {
    return double(item.last - item.first);
  };
  const Key start = [](const SectionItem& item, double) { return -double(item.first); };
  const Key end = [](const SectionItem& item, double) { return double(item.last); };
  const Key breadth = [](const SectionItem&, double peak) { return peak; };
  const struct {
    const char* method;
    Key key;
    Fit fit;
  } portfolio[] = {
      {"size first-fit", size, Fit::kFirst},       {"size best-fit", size, Fit::kBest},
      {"area first-fit", area, Fit::kFirst},       {"duration first-fit", duration, Fit::kFirst},
      {"breadth first-fit", breadth, Fit::kFirst}, {"start first-fit", start, Fit::kFirst},
      {"start best-fit", start, Fit::kBest},       {"end first-fit", end, Fit::kFirst},
  };
  GreedyPlacer placer(problem.items);
  Solution best;
  std::vector<double> keys(problem.items.size());
  for (const auto& [method, key, fit] : portfolio) {
    for (std::size_t item = 0; item < keys.size(); ++item) {
      keys[item] = key(problem.items[item], double(peaks[item]));
    }
    keep_if_smaller(problem, placer.place(order_by(problem, keys), fit), method, best);
    if (best.arena <= target || placer.visits() > kGreedyVisits) break;
  }
  return best;
}

// Searches for the target, then repeatedly for an arena halfway between the best found and the
// least that is possible, or seems so. Each search may spend three quarters of the remaining steps.
std::int64_t improve_by_search(const Problem& problem, std::int64_t target, std::int64_t max_steps,
                               Solution& best) {
  std::int64_t n_crossings = 0;
  for (const SectionItem& item : problem.items) {
    n_crossings += static_cast<std::int64_t>(item.last - item.first);
  }
  if (n_crossings > std::min(kMaxCrossings, max_steps)) return 0;
  PlacementSearch search(problem.items, problem.n_sections);
  std::int64_t low = target;  // no smaller arena will be found
  std::int64_t aim = target;
  while (low < best.arena && search.steps() < max_steps) {
    const std::int64_t steps_left = max_steps - search.steps();
    if (search.fit(aim, steps_left - steps_left / 4) == SearchOutcome::kFound) {
      keep_if_smaller(problem, search.offsets(), "search", best);
    } else {
      low = aim + 1;
    }
    aim = low + (best.arena - 1 - low) / 2;
  }
  return search.steps();
}

std::vector<std::int64_t> to_offsets_bytes(const Problem& problem, const Solution& solution,
                                           std::size_t n_intervals) {
  std::vector<std::int64_t> offsets_bytes(n_intervals, 0);
  for (std::size_t item = 0; item < problem.items.size(); ++item) {
    offsets_bytes[problem.intervals[item]] = solution.offsets[item] * problem.unit_bytes;
  }
  return offsets_bytes;
}

}  // namespace

Placement place_intervals(const std::vector<Interval>& intervals, const PlacementOptions& options) {
  if (options.capacity_bytes.value_or(0) < 0) {
    throw PlanError("capacity_bytes must not be negative");
  }
  if (options.search_steps < 0) throw PlanError("search_steps must not be negative");
  const Problem problem = make_problem(intervals, options.alignment_bytes);
  Placement placement;
  placement.method = "empty";
  placement.offsets_bytes.assign(intervals.size(), 0);
  if (problem.items.empty()) return placement;
  const std::int64_t capacity = options.capacity_bytes.value_or(0) / problem.unit_bytes;
  const std::int64_t target = std::max(problem.lower_bound, capacity);
  Solution best = place_greedily(problem, target);
  if (best.arena > target && options.search_steps > 0) {
    placement.search_steps = improve_by_search(problem, target, options.search_steps, best);
  }
  placement.offsets_bytes = to_offsets_bytes(problem, best, intervals.size());
  placement.arena_bytes = best.arena * problem.unit_bytes;
  placement.lower_bound_bytes = problem.lower_bound * problem.unit_bytes;
  placement.method = best.method;
  check_placement(intervals, placement.offsets_bytes);
  return placement;
}

std::int64_t lower_bound_bytes(const std::vector<Interval>& intervals,
                               std::int64_t alignment_bytes) {
  const Problem problem = make_problem(intervals, alignment_bytes);
  return problem.lower_bound * problem.unit_bytes;
}

void check_placement(const std::vector<Interval>& intervals,
                     const std::vector<std::int64_t>& offsets_bytes) {
  require_valid(intervals, 1);
  require_offsets(intervals, offsets_bytes);
  const auto require_apart = [&](std::size_t below, std::size_t above) {
    const std::int64_t distance_bytes = offsets_bytes[above] - offsets_bytes[below];
    if (distance_bytes >= intervals[below].size_bytes) return;
    throw PlanError(describe(intervals, offsets_bytes, below) + " and " +
                    describe(intervals, offsets_bytes, above) + " overlap in bytes and in time");
  };
  // The live intervals in ascending offset. No two overlap, so a new one is compared with its
  // neighbours only.
  std::set<std::pair<std::int64_t, std::size_t>> live;
  for (const Event& event : events_of(intervals)) {
    const std::pair placed(offsets_bytes[event.interval], event.interval);
    if (!event.begins) {
      live.erase(placed);
      continue;
    }
    const auto position = live.insert(placed).first;
    const auto above = std::next(position);
    if (position != live.begin()) require_apart(std::prev(position)->second, event.interval);
    if (above != live.end()) require_apart(event.interval, above->second);
  }
}

}  // namespace offload
