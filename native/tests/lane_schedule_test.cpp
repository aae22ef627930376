#include "offload/lane_schedule.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "offload/errors.hpp"

namespace {

using offload::LaneProblem;
using offload::LaneSchedule;
using offload::schedule_lanes;

void test_two_towers() {
  const LaneProblem problem{
      {10, 10, 10, 10, 10, 10, 1}, {{0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {5, 6}}, 2, 0};
  const LaneSchedule found = schedule_lanes(problem, 100);
  CHECK_THAT(found.predicted_ns == 31);
  CHECK_THAT(found.lanes[0] == 0 && found.lanes[1] == 1);
  CHECK_THAT(found.waits.size() == 1);
  CHECK_THAT(found.held.size() + found.joined.size() == 1);
}

void test_one_lane_and_none() {
  CHECK_THAT(schedule_lanes({{}, {}, 3, 0}, 10).method == "nothing to run");
  const LaneSchedule found = schedule_lanes({{1, 2, 3}, {{0, 1}, {1, 2}}, 3, 1}, 10);
  CHECK_THAT(found.predicted_ns == 6);
  CHECK_THAT(found.waits.empty());
  CHECK_THAT(found.method == "one lane");
}

// Launch 5 follows nothing and is long: it fits only on the lane of launches that it does not
// follow.
void test_a_free_lane_is_preferred_to_the_lane_of_the_launch_before() {
  const LaneProblem problem{{2, 8, 3, 3, 1, 5}, {{0, 3}, {2, 3}}, 2, 0};
  CHECK_THAT(schedule_lanes(problem, 0).predicted_ns == 11);  // half of all
}

// Conflicts that no path of lanes and waits orders; there must be none.
std::size_t count_unordered(const LaneProblem& problem, const LaneSchedule& found) {
  const std::size_t n = problem.launch_ns.size();
  std::vector<std::vector<bool>> before(n, std::vector<bool>(n));
  const auto add = [&](std::size_t launch, std::size_t one) {
    before[launch][one] = true;
    for (std::size_t at = 0; at < n; ++at) {
      if (before[one][at]) before[launch][at] = true;
    }
  };
  for (std::size_t launch = 0; launch < n; ++launch) {
    for (std::size_t one = launch; one-- > 0;) {
      if (found.lanes[one] == found.lanes[launch]) {
        add(launch, one);
        break;
      }
    }
    for (const offload::LaneWait& wait : found.waits) {
      if (wait.launch == static_cast<std::int64_t>(launch)) {
        add(launch, static_cast<std::size_t>(wait.ended));
      }
    }
  }
  std::size_t n_unordered = 0;
  for (const auto& [first, second] : problem.conflicts) {
    if (!before[static_cast<std::size_t>(second)][static_cast<std::size_t>(first)]) ++n_unordered;
  }
  return n_unordered;
}

void test_all_conflicts_are_ordered() {
  std::uint32_t draw = 1;
  const auto next = [&draw](std::uint32_t below) {
    draw = draw * 1664525u + 1013904223u;
    return static_cast<std::int64_t>((draw >> 8) % below);
  };
  for (int round = 0; round < 30; ++round) {
    LaneProblem problem;
    problem.n_lanes = 1 + next(6);
    problem.synchronisation_ns = static_cast<double>(next(5));
    for (std::int64_t launch = 0; launch < 80; ++launch) {
      problem.launch_ns.push_back(static_cast<double>(next(50)));
      for (std::int64_t left = launch == 0 ? 0 : next(4); left > 0; --left) {
        problem.conflicts.emplace_back(next(static_cast<std::uint32_t>(launch)), launch);
      }
    }
    const LaneSchedule found = schedule_lanes(problem, 200);
    CHECK_THAT(count_unordered(problem, found) == 0);
    CHECK_THAT(found.predicted_ns >= found.lower_bound_ns);
    CHECK_THAT(schedule_lanes(problem, 200).lanes == found.lanes);
    if (!found.waits.empty()) {
      LaneSchedule fewer = found;
      fewer.waits.pop_back();
      CHECK_THAT(count_unordered(problem, fewer) > 0);
    }
  }
}

std::string error_of(const LaneProblem& problem, std::int64_t max_evaluations = 0) {
  return offload::test::error_of<offload::PlanError>(
      [&] { schedule_lanes(problem, max_evaluations); });
}

void test_bad_input_is_refused() {
  CHECK_THAT(!error_of({{1, 1}, {{1, 0}}, 2, 0}).empty());
  CHECK_THAT(!error_of({{1, 1}, {{0, 2}}, 2, 0}).empty());
  CHECK_THAT(!error_of({{1, -1}, {}, 2, 0}).empty());
  CHECK_THAT(!error_of({{1}, {}, 0, 0}).empty());
  CHECK_THAT(!error_of({{1}, {}, 65, 0}).empty());
  CHECK_THAT(!error_of({{1}, {}, 1, -1}).empty());
  CHECK_THAT(!error_of({{1}, {}, 1, 0}, -1).empty());
}

}  // namespace

int main() {
  test_two_towers();
  test_one_lane_and_none();
  test_a_free_lane_is_preferred_to_the_lane_of_the_launch_before();
  test_all_conflicts_are_ordered();
  test_bad_input_is_refused();
  return offload::test::result();
}
