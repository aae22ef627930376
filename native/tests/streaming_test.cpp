#include "offload/streaming.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "offload/errors.hpp"

namespace {

using offload::search_streaming;
using offload::StreamingOptions;
using offload::StreamingPass;
using offload::StreamingSearch;
using offload::StreamingSimulator;
using offload::StreamingTransfer;
using offload::StreamingWeight;

// 1 ns for each byte, without overhead.
constexpr double kLink = 1e9;

void test_a_pass_without_transfers_computes() {
  const StreamingPass pass = StreamingSimulator({3, 4}).pass({});
  CHECK_THAT(pass.period_ns == 7);
  CHECK_THAT(pass.launch_begin_ns == (std::vector<double>{0, 3}));
  CHECK_THAT(pass.launch_end_ns == (std::vector<double>{3, 7}));
  CHECK_THAT(StreamingSimulator({}).pass({}).period_ns == 0);
}

void test_copies_that_take_turns_with_launches() {
  // Both in one place: each waits for the other's reader.
  const StreamingPass pass = StreamingSimulator({3, 4}).pass({{10, 0, -1}, {20, 1, 0}});
  CHECK_THAT(pass.period_ns == 37);
  CHECK_THAT(pass.transfer_begin_ns == (std::vector<double>{0, 13}));
  CHECK_THAT(pass.launch_begin_ns == (std::vector<double>{10, 33}));
}

void test_copies_beside_launches() {
  // Each in a separate place: the link is never idle.
  const StreamingPass pass = StreamingSimulator({3, 4}).pass({{10, 0, -2}, {20, 1, -1}});
  CHECK_THAT(pass.period_ns == 30);
  CHECK_THAT(pass.transfer_begin_ns == (std::vector<double>{-4, 6}));
}

std::string error_of(const std::vector<StreamingTransfer>& transfers) {
  return offload::test::error_of<offload::PlanError>(
      [&] { StreamingSimulator({1, 1}).period_ns(transfers); });
}

void test_what_cannot_run_is_refused() {
  CHECK_THAT(error_of({{1, 1, 1}}).find("waits for launch 1") != std::string::npos);
  CHECK_THAT(error_of({{1, 0, 0}}) != "");
  CHECK_THAT(error_of({{1, 1, 0}, {1, 0, -1}}) != "");  // the second comes after the first
  CHECK_THAT(error_of({{1, 2, 0}}) != "");
  CHECK_THAT(error_of({{1, 0, -3}}) != "");
  CHECK_THAT(error_of({{1, 0, -1}, {1, 1, 0}}) == "");
}

StreamingOptions options(std::int64_t budget_bytes, std::int64_t floor_bytes, bool tails) {
  return {kLink, 0, budget_bytes, floor_bytes, 1e18, 64, 4096, tails};
}

// `n_weights` weights of this size, each read by its own launch.
std::vector<StreamingWeight> chain(std::size_t n_weights, std::int64_t size_bytes) {
  std::vector<StreamingWeight> weights;
  for (std::size_t index = 0; index < n_weights; ++index) {
    const auto launch = static_cast<std::int64_t>(index);
    weights.push_back({size_bytes, launch, launch, false});
  }
  return weights;
}

void test_plans_keep_their_budget() {
  constexpr std::size_t n_weights = 40;
  constexpr std::int64_t size_bytes = 1 << 20;
  const std::vector<double> launch_ns(n_weights, 1e5);
  for (const bool tails : {false, true}) {
    for (std::int64_t budget = 2; budget < 40; budget += 3) {
      const StreamingSearch found = search_streaming(
          launch_ns, chain(n_weights, size_bytes), options(budget * size_bytes, size_bytes, tails));
      CHECK_THAT(found.best.has_value() && found.n_candidates > 0);
      std::int64_t streamed_bytes = 0;
      for (const std::int64_t one : found.best->streamed_bytes) streamed_bytes += one;
      const std::int64_t resident_bytes = 40 * size_bytes - streamed_bytes;
      CHECK_THAT(resident_bytes + found.best->ring_bytes <= budget * size_bytes);
      CHECK_THAT(found.best->period_ns >= static_cast<double>(streamed_bytes));
    }
  }
}

void test_all_sets_of_a_few() {
  // Two in the ring and one resident hide nothing; the link is never idle with two places.
  const std::vector<double> launch_ns{1e4, 1e4, 1e4};
  const StreamingSearch found =
      search_streaming(launch_ns, chain(3, 1 << 20), options(2 << 20, 1 << 20, false));
  CHECK_THAT(found.best.has_value());
  CHECK_THAT(found.best->order.size() == 2);
  CHECK_THAT(found.best->ring_bytes == 1 << 20);
  CHECK_THAT(found.best->period_ns == 2 * (1 << 20) + 3e4 - 1e4);
}

// What the current piece waits for: the last reader of whatever lies at its position, where each
// piece is read by the launch of its number, of `n_launches`.
std::int64_t wait_of(const std::vector<std::int64_t>& sizes, const std::vector<std::size_t>& pieces,
                     const std::vector<std::int64_t>& begins, std::size_t at) {
  const auto n_launches = static_cast<std::int64_t>(sizes.size());
  std::int64_t latest = -2 * n_launches;
  for (std::size_t other = 0; other < pieces.size(); ++other) {
    const bool is_below = begins[other] + sizes[pieces[other]] <= begins[at];
    if (is_below || begins[at] + sizes[pieces[at]] <= begins[other]) continue;
    const auto reader = static_cast<std::int64_t>(pieces[other]);
    latest = std::max(latest, reader - (other < at ? 0 : n_launches));
  }
  return latest;
}

// The least period of these pieces in a ring, in pages, over all positions.
double all_positions_ns(const std::vector<double>& launch_ns,
                        const std::vector<std::int64_t>& sizes,
                        const std::vector<std::size_t>& pieces, std::int64_t room,
                        std::vector<std::int64_t>& begins) {
  double best = 1e18;
  if (begins.size() < pieces.size()) {
    for (std::int64_t at = 0; at + sizes[pieces[begins.size()]] <= room; ++at) {
      begins.push_back(at);
      best = std::min(best, all_positions_ns(launch_ns, sizes, pieces, room, begins));
      begins.pop_back();
    }
    return best;
  }
  std::vector<StreamingTransfer> transfers;
  for (std::size_t at = 0; at < pieces.size(); ++at) {
    transfers.push_back({static_cast<double>(sizes[pieces[at]] * 4096),
                         static_cast<std::int64_t>(pieces[at]),
                         wait_of(sizes, pieces, begins, at)});
  }
  return StreamingSimulator(launch_ns).period_ns(transfers);
}

double all_sets_ns(const std::vector<double>& launch_ns, const std::vector<std::int64_t>& sizes,
                   std::int64_t budget) {
  double best = 1e18;
  for (std::uint32_t set = 1; set < 1u << sizes.size(); ++set) {
    std::vector<std::size_t> pieces;
    std::int64_t room = budget;
    for (std::size_t index = 0; index < sizes.size(); ++index) {
      if (((set >> index) & 1u) != 0) {
        pieces.push_back(index);
      } else {
        room -= sizes[index];
      }
    }
    std::vector<std::int64_t> begins;
    best = std::min(best, all_positions_ns(launch_ns, sizes, pieces, room, begins));
  }
  return best;
}

void test_all_positions_of_a_few() {
  std::uint64_t state = 1;
  const auto draw = [&state](std::uint64_t most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int64_t>((state >> 33) % most);
  };
  for (int turn = 0; turn < 30; ++turn) {
    std::vector<std::int64_t> sizes;
    std::vector<double> launch_ns;
    std::vector<StreamingWeight> weights;
    std::int64_t total = 0;
    for (std::int64_t index = 0; index < 5; ++index) {
      sizes.push_back(1 + draw(4));
      launch_ns.push_back(static_cast<double>(draw(16'000)));
      weights.push_back({sizes.back() * 4096, index, index, false});
      total += sizes.back();
    }
    const std::int64_t budget = std::min<std::int64_t>(total - 1, 4 + draw(6));
    const StreamingSearch found =
        search_streaming(launch_ns, weights, options(budget * 4096, 4 * 4096, false));
    CHECK_THAT(found.best.has_value());
    CHECK_THAT(std::abs(found.best->period_ns - all_sets_ns(launch_ns, sizes, budget)) < 1e-3);
  }
}

void test_pieces_of_one_launch_are_copied_as_places_become_free() {
  // The second and third weight are first read by the same launch, and each takes a place that
  // another launch's piece had before; the input lists first the one whose place is free last.
  const std::vector<double> launch_ns{5e3, 2e4, 1e3};
  const std::vector<StreamingWeight> weights{
      {4096, 0, 0, false}, {8192, 1, 1, false}, {8192, 2, 2, false}, {4096, 2, 2, false}};
  const StreamingSearch found = search_streaming(launch_ns, weights, options(12288, 12288, false));
  CHECK_THAT(found.best.has_value());
  CHECK_THAT(found.best->order == (std::vector<std::int64_t>{0, 1, 3, 2}));
}

void test_bad_options_are_refused() {
  const auto fails = [](const std::vector<StreamingWeight>& weights, StreamingOptions wrong) {
    try {
      search_streaming({1}, weights, wrong);
    } catch (const offload::PlanError&) {
      return true;
    }
    return false;
  };
  const StreamingOptions right = options(1 << 20, 1 << 19, true);
  CHECK_THAT(!fails(chain(1, 4096), right));
  CHECK_THAT(fails(chain(2, 4096), right));  // the second is read by a launch that does not exist
  CHECK_THAT(fails({{-1, 0, 0, false}}, right));
  CHECK_THAT(fails({{std::int64_t{1} << 62, 0, 0, false}}, right));
  StreamingOptions wrong = right;
  wrong.granule_bytes = 100;
  CHECK_THAT(fails(chain(1, 4096), wrong));
  wrong = right;
  wrong.link_bytes_per_second = 0;
  CHECK_THAT(fails(chain(1, 4096), wrong));
}

}  // namespace

int main() {
  test_a_pass_without_transfers_computes();
  test_copies_that_take_turns_with_launches();
  test_copies_beside_launches();
  test_what_cannot_run_is_refused();
  test_plans_keep_their_budget();
  test_all_sets_of_a_few();
  test_all_positions_of_a_few();
  test_pieces_of_one_launch_are_copied_as_places_become_free();
  test_bad_options_are_refused();
  return offload::test::result();
}
