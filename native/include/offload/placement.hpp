// Static memory planning: byte offsets for values with known live ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace offload {

// A value that is live in the steps [first, last) and then takes size_bytes. With first == last or
// no bytes it takes nothing, conflicts with nothing and is put at offset 0.
struct Interval {
  std::int64_t first;
  std::int64_t last;
  std::int64_t size_bytes;
};

// The default limit of place_intervals: at worst about a tenth of a second.
inline constexpr std::int64_t kDefaultSearchSteps = 30'000'000;

struct PlacementOptions {
  // Offsets are multiples of it, and sizes are rounded up to it. A power of two.
  std::int64_t alignment_bytes = 1;
  // A sufficient arena size; without it, the arena is made as small as the lower bound if possible.
  std::optional<std::int64_t> capacity_bytes;
  // Limits the search, in visits to items and sections (a visit takes two to four nanoseconds).
  // Counted, not timed, so the same input always gives the same placement. 0 turns it off.
  std::int64_t search_steps = kDefaultSearchSteps;
};

struct Placement {
  std::vector<std::int64_t> offsets_bytes;
  std::int64_t arena_bytes = 0;        // the largest offset + aligned size
  std::int64_t lower_bound_bytes = 0;  // no placement has a smaller arena
  std::string method;                  // what found it: "<order> first-fit", "search", ...
  std::int64_t search_steps = 0;       // spent
};

// Assigns offsets so that no two intervals overlap both in time and in bytes.
//
// Tries a portfolio of greedy orders and, if none meets the capacity (or the lower bound),
// searches. An arena equal to the lower bound is optimal. So is any result for a few intervals, as
// the search then ends with a proof. If the capacity cannot be met, the result is the best
// placement found. The result has passed check_placement.
//
// Thread: any; nothing is shared. Errors: PlanError if an interval has last < first or a negative
// size, if the aligned sizes add up to more than 2^63 - 1 bytes, or if an option is out of range.
Placement place_intervals(const std::vector<Interval>& intervals, const PlacementOptions& options);

// The live bytes in the fullest step, each size rounded up to the alignment.
//
// Thread: any. Errors: as place_intervals.
std::int64_t lower_bound_bytes(const std::vector<Interval>& intervals,
                               std::int64_t alignment_bytes);

// Values that are live in a partial order: the execution is divided into chains whose steps run in
// order. By value and chain (value * n_chains + chain), `begins` is the number of its steps that
// have ended, whatever the timing, before the value becomes live, and `ends` the number that must
// have ended before it stops being live. A value is therefore dead before another becomes live if
// no end of it exceeds the begin of the other in the same chain. A value without an end above
// 0, or without bytes, takes nothing.
struct PartialIntervals {
  std::size_t n_chains = 0;
  std::vector<std::int64_t> begins;
  std::vector<std::int64_t> ends;
  std::vector<std::int64_t> sizes_bytes;
};

// Like place_intervals, for values in a partial order: greedy orders, then a search over orders
// that moves the highest values forward. The lower bound is that of a set of values of which any
// two may be live at once; a smaller arena than the result may exist.
//
// Thread: any; nothing is shared. Errors: as place_intervals; PlanError if the counts do not fit.
Placement place_partial(const PartialIntervals& values, const PlacementOptions& options);

// Checks a placement of values in a partial order, from any planner.
//
// Thread: any. Errors: PlanError as check_placement.
void check_partial_placement(const PartialIntervals& values,
                             const std::vector<std::int64_t>& offsets_bytes);

// Checks a placement, from any planner, in O(n log n).
//
// Thread: any. Errors: PlanError if two intervals overlap both in time and in bytes (it names
// them), if an offset is negative or ends past 2^63 - 1, or if the counts differ; and as
// place_intervals for bad intervals.
void check_placement(const std::vector<Interval>& intervals,
                     const std::vector<std::int64_t>& offsets_bytes);

}  // namespace offload
