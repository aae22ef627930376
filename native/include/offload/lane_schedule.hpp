// Launches of a program on several lanes of one machine: the lane of each launch, and the waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace offload {

// Launches in recorded order. A conflict (a, b) is a launch and a later one that must not begin
// before a has ended. A lane runs its launches in recorded order, one at a time.
struct LaneProblem {
  std::vector<double> launch_ns;
  std::vector<std::pair<std::int64_t, std::int64_t>> conflicts;
  std::int64_t n_lanes = 1;
  double synchronisation_ns = 0;  // what a wait for another lane costs the waiting lane
};

// Before `launch` its lane waits until `ended`, a launch of another lane, has ended.
struct LaneWait {
  std::int64_t launch;
  std::int64_t ended;
};

struct LaneSchedule {
  std::vector<std::int64_t> lanes;  // by launch, numbered in order of first use
  // As few as the lanes allow: the pairs in the transitive reduction of conflicts and lane order
  // that cross lanes. In the order of launches.
  std::vector<LaneWait> waits;
  // The next execution begins when all launches have ended. At its end the first lane waits for the
  // launches in `joined`. Before it begins, each lane in `held` waits for the end of the first lane
  // in the execution before. Other lanes are already ordered by waits.
  std::vector<std::int64_t> joined;
  std::vector<std::int64_t> held;
  double predicted_ns = 0;
  double lower_bound_ns = 0;  // for any lanes: the longest chain, or the total divided by the lanes
  std::string method;         // what found it: "one lane", "earliest end", ..., "search"
  std::int64_t n_evaluations = 0;
};

// Default limits of the search: lanes tried, and launches put on lanes in total.
inline constexpr std::int64_t kDefaultLaneEvaluations = 2'000;
inline constexpr std::int64_t kDefaultPlacedLaunches = 40'000;

// Tries one lane, list schedules by earliest end, by rank and by chain, and then other lanes for
// launches on the critical path, at most `max_evaluations` times. Deterministic. By prediction
// never slower than one lane.
//
// Thread: any; nothing is shared. Errors: PlanError if a duration is negative or not finite, a
// conflict is not of a launch and a later one, or the number of lanes is not from 1 to 64.
LaneSchedule schedule_lanes(const LaneProblem& problem, std::int64_t max_evaluations);

}  // namespace offload
