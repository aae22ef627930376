#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "offload/errors.hpp"
#include "offload/placement.hpp"

namespace offload {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

// Limit of steps that compare each pair of values once, with one step for each chain.
constexpr std::int64_t kMaxPairSteps = 4'000'000'000;

// Source: the mixing step of SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom
// Number Generators", OOPSLA 2014.
std::uint64_t scramble(std::uint64_t word) {
  word += 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

std::size_t count_of(const PartialIntervals& values) { return values.sizes_bytes.size(); }

std::string describe(const PartialIntervals& values, std::size_t index) {
  return "value " + std::to_string(index) + " of " + std::to_string(values.sizes_bytes[index]) +
         " bytes";
}

void require_valid(const PartialIntervals& values, std::int64_t alignment_bytes) {
  const std::size_t expected = count_of(values) * values.n_chains;
  if (values.begins.size() != expected || values.ends.size() != expected) {
    throw PlanError("expected " + std::to_string(expected) + " begins and ends, got " +
                    std::to_string(values.begins.size()) + " and " +
                    std::to_string(values.ends.size()));
  }
  if (alignment_bytes < 1 || (alignment_bytes & (alignment_bytes - 1)) != 0) {
    throw PlanError("alignment_bytes must be a power of two, got " +
                    std::to_string(alignment_bytes));
  }
  const auto n_pairs = static_cast<double>(count_of(values)) * static_cast<double>(expected);
  if (n_pairs > static_cast<double>(kMaxPairSteps)) {
    throw PlanError(std::to_string(count_of(values)) + " values in " +
                    std::to_string(values.n_chains) + " chains are too many to place");
  }
  std::int64_t free_bytes = kMaxBytes;
  for (std::size_t index = 0; index < count_of(values); ++index) {
    const std::int64_t size_bytes = values.sizes_bytes[index];
    if (size_bytes < 0) throw PlanError(describe(values, index) + " has negative size");
    if (size_bytes > free_bytes - (alignment_bytes - 1)) {
      throw PlanError("the aligned sizes add up to more than 2^63 - 1 bytes at " +
                      describe(values, index));
    }
    free_bytes -= (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  }
}

bool takes_memory(const PartialIntervals& values, std::size_t index) {
  if (values.sizes_bytes[index] == 0) return false;
  const std::int64_t* const ends = values.ends.data() + index * values.n_chains;
  return std::any_of(ends, ends + values.n_chains, [](std::int64_t end) { return end > 0; });
}

// Whether `one` is dead before `other` becomes live.
bool precedes(const PartialIntervals& values, std::size_t one, std::size_t other) {
  const std::int64_t* const ends = values.ends.data() + one * values.n_chains;
  const std::int64_t* const begins = values.begins.data() + other * values.n_chains;
  for (std::size_t chain = 0; chain < values.n_chains; ++chain) {
    if (ends[chain] > begins[chain]) return false;
  }
  return true;
}

bool exist_at_once(const PartialIntervals& values, std::size_t one, std::size_t other) {
  return !precedes(values, one, other) && !precedes(values, other, one);
}

// The values that take memory, and for each the others that may be live at the same time.
class Conflicts {
 public:
  Conflicts(const PartialIntervals& values, std::int64_t alignment_bytes) {
    for (std::size_t index = 0; index < count_of(values); ++index) {
      if (!takes_memory(values, index)) continue;
      items_.push_back(index);
      const std::int64_t units = (values.sizes_bytes[index] - 1) / alignment_bytes + 1;
      sizes_.push_back(units * alignment_bytes);
    }
    others_.resize(size());
    for (std::uint32_t one = 0; one < size(); ++one) {
      for (std::uint32_t other = one + 1; other < size(); ++other) {
        if (!exist_at_once(values, items_[one], items_[other])) continue;
        others_[one].push_back(other);
        others_[other].push_back(one);
      }
    }
  }

  std::size_t size() const { return items_.size(); }
  std::size_t item(std::size_t index) const { return items_[index]; }
  std::int64_t size_of(std::size_t index) const { return sizes_[index]; }
  const std::vector<std::uint32_t>& others(std::size_t index) const { return others_[index]; }

  // A greedy bound: the most bytes found in values of which any two may be live at once. From each
  // value, others are added in order of size, the largest first.
  std::int64_t lower_bound() const {
    std::int64_t most = 0;
    std::vector<std::uint32_t> n_shared(size());
    for (std::size_t seed = 0; seed < size(); ++seed) {
      std::vector<std::uint32_t> candidates = others_[seed];
      std::sort(candidates.begin(), candidates.end(), [&](std::uint32_t one, std::uint32_t other) {
        return sizes_[one] != sizes_[other] ? sizes_[one] > sizes_[other] : one < other;
      });
      std::fill(n_shared.begin(), n_shared.end(), 0);
      std::int64_t total = sizes_[seed];
      std::uint32_t n_chosen = 0;
      for (const std::uint32_t candidate : candidates) {
        if (n_shared[candidate] != n_chosen) continue;  // conflicts with not all chosen values
        total += sizes_[candidate];
        ++n_chosen;
        for (const std::uint32_t other : others_[candidate]) ++n_shared[other];
      }
      most = std::max(most, total);
    }
    return most;
  }

 private:
  std::vector<std::size_t> items_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::vector<std::uint32_t>> others_;
};

using Order = std::vector<std::uint32_t>;

// First fit in the given orders; keeps the smallest arena.
class FirstFit {
 public:
  explicit FirstFit(const Conflicts& conflicts)
      : conflicts_(conflicts), offsets_(conflicts.size()), is_placed_(conflicts.size()) {}

  // Places values in this order and returns the arena.
  std::int64_t arena_of(const Order& order) {
    std::fill(is_placed_.begin(), is_placed_.end(), false);
    std::int64_t arena = 0;
    for (const std::uint32_t item : order) {
      offsets_[item] = lowest(item);
      is_placed_[item] = true;
      arena = std::max(arena, offsets_[item] + conflicts_.size_of(item));
    }
    if (!has_best_ || arena < best_arena_) {
      has_best_ = true;
      best_arena_ = arena;
      best_offsets_ = offsets_;
    }
    return arena;
  }

  // A value of the latest placement that reaches the top.
  std::uint32_t highest(const Order& order, std::int64_t arena) const {
    return *std::find_if(order.begin(), order.end(), [&](std::uint32_t item) {
      return offsets_[item] + conflicts_.size_of(item) == arena;
    });
  }

  std::int64_t best_arena() const { return best_arena_; }
  const std::vector<std::int64_t>& best_offsets() const { return best_offsets_; }
  std::int64_t steps() const { return steps_; }

 private:
  std::int64_t lowest(std::uint32_t item) {
    taken_.clear();
    for (const std::uint32_t other : conflicts_.others(item)) {
      if (!is_placed_[other]) continue;
      taken_.emplace_back(offsets_[other], offsets_[other] + conflicts_.size_of(other));
    }
    steps_ += static_cast<std::int64_t>(conflicts_.others(item).size() + 4 * taken_.size()) + 1;
    std::sort(taken_.begin(), taken_.end());
    std::int64_t at = 0;
    for (const auto& [begin, end] : taken_) {
      if (begin - at >= conflicts_.size_of(item)) break;
      at = std::max(at, end);
    }
    return at;
  }

  const Conflicts& conflicts_;
  std::vector<std::int64_t> offsets_;
  std::vector<bool> is_placed_;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_;
  std::int64_t best_arena_ = 0;
  bool has_best_ = false;
  std::vector<std::int64_t> best_offsets_;
  std::int64_t steps_ = 0;
};

struct NamedOrder {
  const char* name;
  Order order;
};

std::vector<NamedOrder> greedy_orders(const Conflicts& conflicts) {
  Order in_order(conflicts.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  std::vector<NamedOrder> orders{{"size", in_order}, {"conflicts", in_order}, {"order", in_order}};
  std::stable_sort(orders[0].order.begin(), orders[0].order.end(), [&](auto one, auto other) {
    return conflicts.size_of(one) > conflicts.size_of(other);
  });
  orders[1].order = orders[0].order;
  std::stable_sort(orders[1].order.begin(), orders[1].order.end(), [&](auto one, auto other) {
    return conflicts.others(one).size() > conflicts.others(other).size();
  });
  return orders;
}

// Every placement is first fit in the order of its offsets, so some order gives the optimum.
void search(Order order, std::int64_t enough, std::int64_t max_steps, FirstFit& placer) {
  std::uint64_t n_draws = 0;
  const auto draw = [&](std::size_t below) {
    return static_cast<std::size_t>(scramble(n_draws++) % below);
  };
  std::int64_t arena = placer.arena_of(order);
  while (placer.best_arena() > enough && placer.steps() < max_steps) {
    Order next = order;
    const std::uint32_t top = placer.highest(order, arena);
    const bool moves_top = draw(4) != 0;
    const std::size_t from =
        moves_top
            ? static_cast<std::size_t>(std::find(next.begin(), next.end(), top) - next.begin())
            : draw(next.size());
    const std::size_t to = moves_top ? draw(from + 1) : draw(next.size());
    const std::uint32_t item = next[from];
    next.erase(next.begin() + static_cast<std::ptrdiff_t>(from));
    next.insert(next.begin() + static_cast<std::ptrdiff_t>(to), item);
    const std::int64_t found = placer.arena_of(next);
    if (found <= arena) {
      arena = found;
      order = std::move(next);
    } else {
      arena = placer.arena_of(order);  // restores the offsets that `highest` reads
    }
  }
}

}  // namespace

Placement place_partial(const PartialIntervals& values, const PlacementOptions& options) {
  if (options.capacity_bytes.value_or(0) < 0) {
    throw PlanError("capacity_bytes must not be negative");
  }
  if (options.search_steps < 0) throw PlanError("search_steps must not be negative");
  require_valid(values, options.alignment_bytes);
  const Conflicts conflicts(values, options.alignment_bytes);
  Placement placement;
  placement.offsets_bytes.assign(count_of(values), 0);
  placement.method = "empty";
  if (conflicts.size() == 0) return placement;
  placement.lower_bound_bytes = conflicts.lower_bound();
  const std::int64_t enough =
      std::max(placement.lower_bound_bytes, options.capacity_bytes.value_or(0));
  FirstFit placer(conflicts);
  Order best_order;
  for (const NamedOrder& one : greedy_orders(conflicts)) {
    const std::int64_t before = placer.best_arena();
    const bool is_first = best_order.empty();
    const std::int64_t arena = placer.arena_of(one.order);
    if (is_first || arena < before) {
      best_order = one.order;
      placement.method = std::string(one.name) + " first-fit";
    }
    if (arena <= enough) break;
  }
  const std::int64_t greedy_arena = placer.best_arena();
  const std::int64_t greedy_steps = placer.steps();
  if (greedy_arena > enough && options.search_steps > 0) {
    search(best_order, enough, options.search_steps, placer);
    placement.search_steps = placer.steps() - greedy_steps;
    if (placer.best_arena() < greedy_arena) placement.method = "search";
  }
  placement.arena_bytes = placer.best_arena();
  for (std::size_t index = 0; index < conflicts.size(); ++index) {
    placement.offsets_bytes[conflicts.item(index)] = placer.best_offsets()[index];
  }
  check_partial_placement(values, placement.offsets_bytes);
  return placement;
}

void check_partial_placement(const PartialIntervals& values,
                             const std::vector<std::int64_t>& offsets_bytes) {
  require_valid(values, 1);
  if (offsets_bytes.size() != count_of(values)) {
    throw PlanError("expected an offset for each of " + std::to_string(count_of(values)) +
                    " values, got " + std::to_string(offsets_bytes.size()));
  }
  std::vector<std::size_t> order;
  for (std::size_t index = 0; index < count_of(values); ++index) {
    if (offsets_bytes[index] < 0 || offsets_bytes[index] > kMaxBytes - values.sizes_bytes[index]) {
      throw PlanError(describe(values, index) + " lies outside of [0, 2^63 - 1]");
    }
    if (takes_memory(values, index)) order.push_back(index);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t one, std::size_t other) {
    return offsets_bytes[one] < offsets_bytes[other];
  });
  for (std::size_t at = 0; at < order.size(); ++at) {
    const std::size_t one = order[at];
    const std::int64_t end = offsets_bytes[one] + values.sizes_bytes[one];
    for (std::size_t behind = at + 1; behind < order.size(); ++behind) {
      const std::size_t other = order[behind];
      if (offsets_bytes[other] >= end) break;
      if (!exist_at_once(values, one, other)) continue;
      throw PlanError(describe(values, one) + " at offset " + std::to_string(offsets_bytes[one]) +
                      " shares bytes with " + describe(values, other) + " at offset " +
                      std::to_string(offsets_bytes[other]) + " while both may exist");
    }
  }
}

}  // namespace offload
