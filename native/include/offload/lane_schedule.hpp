// Launches of one program on several lanes of one machine: which lane takes each, and who waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace offload {

// Launches in recorded order. A conflict is a launch and a later one that must not begin before it
// has ended. A lane takes its launches up in recorded order, one at a time.
struct LaneProblem {
  std::vector<double> launch_ns;
  std::vector<std::pair<std::int64_t, std::int64_t>> conflicts;
  std::int64_t n_lanes = 1;
  double synchronisation_ns = 0;  // what a wait for another lane takes of the lane that waits
};

// A lane waits before a launch until a launch of another lane has ended.
struct LaneWait {
  std::int64_t launch;
  std::int64_t ended;
};

struct LaneSchedule {
  std::vector<std::int64_t> lanes;  // by launch, numbered as they are first used
  // As few as the lanes allow: those cross pairs of lanes that are in the transitive reduction of
  // conflicts and lanes. In the order of launches.
  std::vector<LaneWait> waits;
  // The next execution begins when all has ended: at its end the first lane waits for the launches
  // in `joined`, and each lane in `held` waits for the first one of the execution before it begins.
  // Others are ordered by waits already.
  std::vector<std::int64_t> joined;
  std::vector<std::int64_t> held;
  double predicted_ns = 0;
  double lower_bound_ns = 0;  // no lanes take less: the longest chain, or all launches shared out
  std::string method;         // what found it: "one lane", "earliest end", ..., "search"
  std::int64_t n_evaluations = 0;
};

// What a search affords by default, in launches that are put on lanes; and so many at the most.
inline constexpr std::int64_t kDefaultLaneEvaluations = 2'000;
inline constexpr std::int64_t kDefaultPlacedLaunches = 40'000;

// Tries one lane, lists of launches by when they can end, by rank and by chain, and then lanes of
// launches on the critical path, so many as `max_evaluations`; the same input always gives the same
// lanes. Never slower by prediction than one lane.
//
// Thread: any; nothing is shared. Errors: PlanError if a duration is negative or not finite, a
// conflict is not of a launch and a later one, or there are no lanes or more than 64.
LaneSchedule schedule_lanes(const LaneProblem& problem, std::int64_t max_evaluations);

}  // namespace offload
