#include "offload/placement.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "offload/errors.hpp"

namespace {

using offload::check_placement;
using offload::Interval;
using offload::lower_bound_bytes;
using offload::place_intervals;
using offload::Placement;
using offload::PlacementOptions;
using offload::test::Numbers;
using offload::test::throws;

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

// The error of a placement, or nothing.
std::string error_of(const std::vector<Interval>& intervals, const PlacementOptions& options) {
  return offload::test::error_of<offload::PlanError>([&] { place_intervals(intervals, options); });
}

std::string check_error_of(const std::vector<Interval>& intervals,
                           const std::vector<std::int64_t>& offsets_bytes) {
  return offload::test::error_of<offload::PlanError>(
      [&] { check_placement(intervals, offsets_bytes); });
}

// Cuts a rectangle of n_steps by capacity_bytes into pieces, so that the pieces fit without a gap.
std::vector<Interval> dissection(std::size_t n_pieces, std::int64_t n_steps,
                                 std::int64_t capacity_bytes, Numbers& numbers) {
  std::vector<Interval> pieces{{0, n_steps, capacity_bytes}};
  for (int attempt = 0; attempt < 10'000 && pieces.size() < n_pieces; ++attempt) {
    Interval& piece =
        pieces[static_cast<std::size_t>(numbers.below(static_cast<std::int64_t>(pieces.size())))];
    Interval rest = piece;
    if (numbers.below(2) == 0 && piece.last - piece.first > 1) {
      piece.last = rest.first = piece.first + 1 + numbers.below(piece.last - piece.first - 1);
    } else if (piece.size_bytes > 1) {
      piece.size_bytes = 1 + numbers.below(piece.size_bytes - 1);
      rest.size_bytes -= piece.size_bytes;
    } else {
      continue;
    }
    pieces.push_back(rest);
  }
  for (std::size_t left = pieces.size(); left > 1; --left) {
    std::swap(pieces[left - 1],
              pieces[static_cast<std::size_t>(numbers.below(static_cast<std::int64_t>(left)))]);
  }
  return pieces;
}

void nothing_to_place() {
  CHECK_THAT(place_intervals({}, {}).arena_bytes == 0);
  const Placement placement = place_intervals({{3, 3, 100}, {0, 9, 0}}, {});
  CHECK_THAT(placement.offsets_bytes == std::vector<std::int64_t>({0, 0}));
  CHECK_THAT(placement.arena_bytes == 0);
  CHECK_THAT(placement.method == "empty");
}

void values_that_never_meet_share_bytes() {
  const Placement placement = place_intervals({{0, 2, 100}, {2, 4, 60}, {4, 5, 100}}, {});
  CHECK_THAT(placement.offsets_bytes == std::vector<std::int64_t>({0, 0, 0}));
  CHECK_THAT(placement.arena_bytes == 100);
}

void offsets_are_aligned() {
  PlacementOptions options;
  options.alignment_bytes = 64;
  const std::vector<Interval> intervals{{0, 4, 1}, {1, 3, 65}, {2, 5, 64}, {0, 1, 7}};
  const Placement placement = place_intervals(intervals, options);
  for (const std::int64_t offset : placement.offsets_bytes) CHECK_THAT(offset % 64 == 0);
  CHECK_THAT(placement.lower_bound_bytes == 64 + 128 + 64);
  CHECK_THAT(placement.arena_bytes == placement.lower_bound_bytes);
  CHECK_THAT(lower_bound_bytes(intervals, 64) == placement.lower_bound_bytes);
}

void dissections_are_put_together_again() {
  Numbers numbers(1);
  std::int64_t n_searched = 0;
  for (int round = 0; round < 300; ++round) {
    const std::int64_t n_steps = 10 + numbers.below(30);
    const std::vector<Interval> pieces =
        dissection(static_cast<std::size_t>(20 + numbers.below(40)), n_steps, 64, numbers);
    const Placement placement = place_intervals(pieces, {});
    CHECK_THAT(placement.arena_bytes == 64);
    n_searched += placement.search_steps > 0 ? 1 : 0;
  }
  CHECK_THAT(n_searched > 50);
}

// The search counts each visit. It visits every piece in each of its sections when it is made and
// when a run begins, and the pieces that are left in a section whenever one of them is placed.
void visits_are_counted() {
  PlacementOptions options;
  options.search_steps = 1'000'000;
  int n_searched = 0;
  for (std::uint64_t seed = 190; seed < 220; ++seed) {
    Numbers numbers(seed);
    const std::int64_t n_steps = 150 + numbers.below(1500);
    const auto n_pieces = static_cast<std::size_t>(60 + numbers.below(400));
    const std::vector<Interval> pieces = dissection(n_pieces, n_steps, 64, numbers);
    std::set<std::int64_t> begins;
    for (const Interval& piece : pieces) begins.insert(piece.first);
    std::int64_t n_visits = 0;
    for (const std::int64_t begin : begins) {
      std::int64_t n_live = 0;
      for (const Interval& piece : pieces) n_live += piece.first <= begin && begin < piece.last;
      n_visits += 2 * n_live + n_live * (n_live - 1) / 2;
    }
    const Placement found = place_intervals(pieces, options);
    if (found.method != "search") continue;
    CHECK_THAT(found.search_steps > n_visits);
    ++n_searched;
  }
  CHECK_THAT(n_searched > 10);
}

void search_ends_with_a_proof() {
  // 14 bytes are live at once, yet they do not fit in fewer than 15.
  const std::vector<Interval> intervals{{3, 7, 4}, {2, 6, 4}, {1, 5, 2}, {1, 2, 11},
                                        {2, 3, 7}, {5, 6, 5}, {6, 7, 10}};
  const Placement placement = place_intervals(intervals, {});
  CHECK_THAT(placement.lower_bound_bytes == 14);
  CHECK_THAT(placement.arena_bytes == 15);
  CHECK_THAT(placement.search_steps < 10'000);
}

// Greedy orders miss the least arena here, and so does a search that takes values of one size, or
// of one live range, for each other.
void values_of_one_size_are_told_apart() {
  const std::vector<std::vector<Interval>> all{{{2, 6, 1},
                                                {3, 6, 1},
                                                {6, 10, 2},
                                                {0, 10, 1},
                                                {0, 6, 1},
                                                {0, 6, 1},
                                                {6, 7, 2},
                                                {1, 3, 1},
                                                {6, 10, 2},
                                                {3, 10, 2},
                                                {0, 2, 2},
                                                {1, 3, 1},
                                                {0, 1, 2},
                                                {2, 3, 1},
                                                {0, 6, 2},
                                                {7, 10, 2}},
                                               {{3, 6, 4},
                                                {1, 4, 3},
                                                {4, 7, 1},
                                                {0, 1, 5},
                                                {0, 3, 5},
                                                {6, 7, 4},
                                                {0, 4, 1},
                                                {4, 7, 1},
                                                {0, 4, 5},
                                                {4, 7, 1},
                                                {4, 7, 9},
                                                {1, 4, 2},
                                                {3, 4, 1}},
                                               {{4, 6, 3},
                                                {2, 6, 2},
                                                {1, 2, 5},
                                                {1, 3, 1},
                                                {8, 9, 2},
                                                {3, 8, 2},
                                                {2, 10, 3},
                                                {0, 1, 1},
                                                {0, 1, 2},
                                                {0, 4, 1},
                                                {0, 10, 5},
                                                {0, 1, 4},
                                                {0, 4, 2},
                                                {2, 3, 1},
                                                {6, 10, 2},
                                                {1, 2, 1},
                                                {9, 10, 2},
                                                {6, 10, 3}}};
  for (const std::vector<Interval>& intervals : all) {
    const Placement found = place_intervals(intervals, {});
    CHECK_THAT(found.method == "search");
    CHECK_THAT(found.arena_bytes == found.lower_bound_bytes);
  }
}

void capacity_ends_the_search() {
  Numbers numbers(7);
  const std::vector<Interval> pieces = dissection(100, 60, 1024, numbers);
  PlacementOptions options;
  options.search_steps = 0;
  const Placement greedy = place_intervals(pieces, options);
  CHECK_THAT(greedy.arena_bytes > 1024);
  options.search_steps = offload::kDefaultSearchSteps;
  options.capacity_bytes = greedy.arena_bytes;
  CHECK_THAT(place_intervals(pieces, options).search_steps == 0);
  options.capacity_bytes = (greedy.arena_bytes + 1024) / 2;
  CHECK_THAT(place_intervals(pieces, options).arena_bytes <= *options.capacity_bytes);
  options.capacity_bytes = 1;  // cannot be met
  CHECK_THAT(place_intervals(pieces, options).arena_bytes <= greedy.arena_bytes);
}

void few_steps_do_no_harm() {
  Numbers numbers(3);
  const std::vector<Interval> pieces = dissection(200, 100, 4096, numbers);
  PlacementOptions options;
  options.search_steps = 0;
  std::int64_t arena_bytes = place_intervals(pieces, options).arena_bytes;
  for (options.search_steps = 1; options.search_steps < 10'000'000; options.search_steps *= 7) {
    CHECK_THAT(place_intervals(pieces, options).arena_bytes <= arena_bytes);
  }
}

void many_values() {
  Numbers numbers(5);
  std::vector<Interval> short_lived, long_lived;
  for (std::int64_t step = 0; step < 5'000; ++step) {
    const std::int64_t duration = numbers.below(50) == 0 ? 200 : 1 + numbers.below(8);
    short_lived.push_back({step, step + duration, 64 * (1 + numbers.below(256))});
    long_lived.push_back(
        {numbers.below(1'000), 4'000 + numbers.below(1'000), 1 + numbers.below(4'096)});
  }
  for (const auto& intervals : {short_lived, long_lived}) {
    const Placement placement = place_intervals(intervals, {});
    CHECK_THAT(placement.arena_bytes >= placement.lower_bound_bytes);
    CHECK_THAT(placement.arena_bytes <= placement.lower_bound_bytes / 100 * 110);
    CHECK_THAT(place_intervals(intervals, {}).offsets_bytes == placement.offsets_bytes);
  }
}

void bad_input_is_refused() {
  CHECK_THAT(error_of({{0, 1, 4}, {2, 1, 4}}, {}).find("interval 1") != std::string::npos);
  CHECK_THAT(error_of({{0, 1, -4}}, {}).find("negative") != std::string::npos);
  CHECK_THAT(!error_of({{0, 1, kMaxBytes}, {5, 6, 1}}, {}).empty());
  CHECK_THAT(error_of({{0, 1, kMaxBytes}}, {}).empty());
  PlacementOptions options;
  options.alignment_bytes = 24;
  CHECK_THAT(!error_of({}, options).empty());
  options.alignment_bytes = 2;
  CHECK_THAT(!error_of({{0, 1, kMaxBytes}}, options).empty());
  options.search_steps = -1;
  CHECK_THAT(!error_of({}, options).empty());
  options.search_steps = 0;
  options.capacity_bytes = -1;
  CHECK_THAT(!error_of({}, options).empty());
}

void checker_finds_what_overlaps() {
  const std::vector<Interval> intervals{{0, 4, 8}, {2, 6, 8}, {4, 8, 8}, {1, 1, 8}, {0, 8, 0}};
  CHECK_THAT(check_error_of(intervals, {0, 8, 0, 0, 0}).empty());
  const std::string error = check_error_of(intervals, {0, 7, 0, 0, 0});
  CHECK_THAT(error.find("interval 0") != std::string::npos);
  CHECK_THAT(error.find("interval 1") != std::string::npos);
  CHECK_THAT(!check_error_of(intervals, {0, 0, 8, 0, 0}).empty());
  CHECK_THAT(!check_error_of(intervals, {0, 8, 9, 0, 0}).empty());
  CHECK_THAT(!check_error_of(intervals, {-8, 8, 0, 0, 0}).empty());
  CHECK_THAT(!check_error_of(intervals, {kMaxBytes, 8, 0, 0, 0}).empty());
  CHECK_THAT(!check_error_of(intervals, {0, 8, 0}).empty());
}

// Two towers of three values each: in each, the third value takes the place of the first.
offload::PartialIntervals towers(std::int64_t size_bytes) {
  offload::PartialIntervals values;
  values.n_chains = 2;
  for (std::size_t tower = 0; tower < 2; ++tower) {
    for (std::int64_t step = 0; step < 3; ++step) {
      for (std::size_t chain = 0; chain < 2; ++chain) {
        values.begins.push_back(chain == tower ? step : 0);
        values.ends.push_back(chain == tower ? step + 2 : 0);
      }
      values.sizes_bytes.push_back(size_bytes);
    }
  }
  return values;
}

void partial_orders_share_bytes_within_a_chain() {
  const Placement found = offload::place_partial(towers(60), {16, {}});
  CHECK_THAT(found.arena_bytes == 4 * 64);
  CHECK_THAT(found.lower_bound_bytes == 4 * 64);
  CHECK_THAT(found.offsets_bytes[0] == found.offsets_bytes[2]);
  CHECK_THAT(found.offsets_bytes[3] == found.offsets_bytes[5]);
  CHECK_THAT(offload::place_partial({2, {}, {}, {}}, {}).method == "empty");
}

// With any single value among others that take nothing, the bound is its size.
void the_bound_of_a_partial_order_counts_each_value() {
  for (std::size_t alone = 0; alone < 3; ++alone) {
    offload::PartialIntervals values{1, {0, 1, 2}, {1, 2, 3}, {8, 8, 8}};
    values.sizes_bytes[alone] = 40;
    const Placement found = offload::place_partial(values, {8, {}});
    CHECK_THAT(found.lower_bound_bytes == 40 && found.arena_bytes == 40);
  }
}

// Random sizes and live ranges: greedy orders miss the best, and the search improves on them.
void many_values_in_a_partial_order() {
  offload::PartialIntervals values;
  values.n_chains = 3;
  std::uint32_t draw = 1;
  const auto next = [&draw](std::uint32_t below) {
    draw = draw * 1664525u + 1013904223u;
    return static_cast<std::int64_t>((draw >> 8) % below);
  };
  for (std::size_t index = 0; index < 120; ++index) {
    for (std::size_t chain = 0; chain < 3; ++chain) {
      const std::int64_t begin = next(40);
      values.begins.push_back(begin);
      values.ends.push_back(next(3) == 0 ? 0 : begin + 1 + next(6));
    }
    values.sizes_bytes.push_back(next(1000));
  }
  const Placement greedy = offload::place_partial(values, {8, {}, 0});
  const Placement searched = offload::place_partial(values, {8, {}, 3'000'000});
  CHECK_THAT(searched.arena_bytes <= greedy.arena_bytes);
  CHECK_THAT(searched.arena_bytes >= searched.lower_bound_bytes);
  CHECK_THAT(searched.offsets_bytes ==
             offload::place_partial(values, {8, {}, 3'000'000}).offsets_bytes);
}

void bad_partial_orders_are_refused() {
  const offload::PartialIntervals right = towers(64);
  offload::check_partial_placement(right, {0, 64, 0, 128, 192, 128});
  CHECK_THAT(throws<offload::PlanError>(
      [&] { offload::check_partial_placement(right, {0, 63, 0, 128, 192, 128}); }));
  CHECK_THAT(throws<offload::PlanError>(
      [&] { offload::check_partial_placement(right, {0, 64, 0, 0, 192, 128}); }));
  CHECK_THAT(throws<offload::PlanError>(
      [&] { offload::check_partial_placement(right, {-1, 64, 0, 128, 192, 128}); }));
  CHECK_THAT(throws<offload::PlanError>([&] { offload::check_partial_placement(right, {0, 64}); }));
  CHECK_THAT(throws<offload::PlanError>([&] { offload::place_partial(right, {24, {}}); }));
  CHECK_THAT(throws<offload::PlanError>([&] { offload::place_partial(right, {8, -1}); }));
  CHECK_THAT(throws<offload::PlanError>([&] { offload::place_partial(right, {8, {}, -1}); }));
  CHECK_THAT(
      throws<offload::PlanError>([&] { offload::place_partial(towers(kMaxBytes / 2), {}); }));
  CHECK_THAT(throws<offload::PlanError>([&] { offload::place_partial(towers(-1), {}); }));
  offload::PartialIntervals short_of = right;
  short_of.ends.pop_back();
  CHECK_THAT(throws<offload::PlanError>([&] { offload::place_partial(short_of, {}); }));
}

}  // namespace

int main() {
  nothing_to_place();
  values_that_never_meet_share_bytes();
  offsets_are_aligned();
  dissections_are_put_together_again();
  visits_are_counted();
  search_ends_with_a_proof();
  values_of_one_size_are_told_apart();
  capacity_ends_the_search();
  few_steps_do_no_harm();
  many_values();
  bad_input_is_refused();
  checker_finds_what_overlaps();
  partial_orders_share_bytes_within_a_chain();
  the_bound_of_a_partial_order_counts_each_value();
  many_values_in_a_partial_order();
  bad_partial_orders_are_refused();
  return offload::test::result();
}
