#include "offload/lane_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "offload/errors.hpp"
#include "task_problem.hpp"

namespace offload {
namespace {

constexpr std::int64_t kMostLanes = 64;
constexpr std::uint32_t kNobody = static_cast<std::uint32_t>(-1);

using Lanes = std::vector<std::uint32_t>;

void check(const LaneProblem& problem) {
  if (problem.n_lanes < 1 || problem.n_lanes > kMostLanes) {
    throw PlanError("expected 1 to " + std::to_string(kMostLanes) + " lanes, got " +
                    std::to_string(problem.n_lanes));
  }
  for (std::size_t at = 0; at <= problem.launch_ns.size(); ++at) {
    const bool is_wait = at == problem.launch_ns.size();
    const double ns = is_wait ? problem.synchronisation_ns : problem.launch_ns[at];
    if (ns >= 0 && std::isfinite(ns)) continue;
    throw PlanError((is_wait ? "a synchronisation" : "launch " + std::to_string(at)) +
                    ": expected a duration of 0 ns or more, got " + std::to_string(ns));
  }
  const auto n_launches = static_cast<std::int64_t>(problem.launch_ns.size());
  for (const auto& [first, second] : problem.conflicts) {
    if (first < 0 || first >= second || second >= n_launches) {
      throw PlanError("conflict " + std::to_string(first) + " to " + std::to_string(second) +
                      ": expected one of " + std::to_string(n_launches) +
                      " launches and a later one");
    }
  }
}

// Times of launches on lanes. Waits follow from vector clocks (C. Fidge, "Timestamps in
// Message-Passing Systems That Preserve the Partial Ordering", 1988): by launch, how many launches
// of each lane have ended when it has. Positions count the launches of a lane.
class LaneTimes {
 public:
  explicit LaneTimes(const LaneProblem& problem)
      : problem_(problem),
        n_(problem.launch_ns.size()),
        n_lanes_(static_cast<std::size_t>(problem.n_lanes)),
        before_at_(n_ + 1),
        position_(n_),
        ended_(n_ * n_lanes_),
        end_ns_(n_),
        waits_for_(n_) {
    for (const auto& one : problem.conflicts)
      ++before_at_[static_cast<std::size_t>(one.second) + 1];
    std::partial_sum(before_at_.begin(), before_at_.end(), before_at_.begin());
    before_.resize(problem.conflicts.size());
    std::vector<std::uint32_t> next(before_at_);
    for (const auto& [first, second] : problem.conflicts) {
      before_[next[static_cast<std::size_t>(second)]++] = static_cast<std::uint32_t>(first);
    }
  }

  Row<std::uint32_t> before(std::size_t launch) const {
    return {before_.data() + before_at_[launch], before_.data() + before_at_[launch + 1]};
  }

  // The end of an execution. Appends the waits to `waits` unless it is null.
  double run(const Lanes& lanes, std::vector<LaneWait>* waits) {
    n_taken_.assign(n_lanes_, 0);
    last_.assign(n_lanes_, kNobody);
    held_.clear();
    joined_.clear();
    n_waits_ = 0;
    double latest_ns = 0;
    for (std::uint32_t launch = 0; launch < n_; ++launch) {
      const std::size_t lane = lanes[launch];
      latest_.assign(n_lanes_, kNobody);
      for (const std::uint32_t one : before(launch)) {
        std::uint32_t& latest = latest_[lanes[one]];
        if (latest == kNobody || one > latest) latest = one;
      }
      latest_[lane] = last_[lane];
      waits_for_[launch] = last_[lane];
      double begin_ns = last_[lane] == kNobody ? 0 : end_ns_[last_[lane]];
      std::size_t n_waits = 0;
      for (const std::uint32_t one : needed(lane)) {
        if (end_ns_[one] > begin_ns) waits_for_[launch] = one;
        begin_ns = std::max(begin_ns, end_ns_[one]);
        ++n_waits;
        if (waits != nullptr) waits->push_back({launch, one});
      }
      n_waits_ += n_waits;
      if (last_[lane] == kNobody && n_waits == 0 && lane != lanes[0]) {
        held_.push_back(static_cast<std::uint32_t>(lane));
        ++n_waits;
      }
      remember(launch, lane);
      end_ns_[launch] = begin_ns + static_cast<double>(n_waits) * problem_.synchronisation_ns +
                        problem_.launch_ns[launch];
      latest_ns = std::max(latest_ns, end_ns_[launch]);
    }
    if (n_ == 0) return 0;
    latest_ = last_;
    joined_ = needed(lanes[0]);
    return latest_ns + static_cast<double>(joined_.size()) * problem_.synchronisation_ns;
  }

  // For the last run: the last launches of other lanes that no wait orders before the end of the
  // first launch's lane, and the lanes whose first launch no wait orders after its beginning.
  const std::vector<std::uint32_t>& joined() const { return joined_; }
  const std::vector<std::uint32_t>& held() const { return held_; }

  std::size_t n_waits() const { return n_waits_ + joined_.size() + held_.size(); }

  // Launches, from the one that ended last, each of which waited for the next in this list.
  std::vector<std::uint32_t> critical_path() const {
    std::vector<std::uint32_t> path;
    auto at = static_cast<std::uint32_t>(std::max_element(end_ns_.begin(), end_ns_.end()) -
                                         end_ns_.begin());
    for (; at != kNobody; at = waits_for_[at]) path.push_back(at);
    return path;
  }

 private:
  // The latest launches of other lanes that the others of them do not imply.
  const std::vector<std::uint32_t>& needed(std::size_t lane) {
    needed_.clear();
    for (std::size_t from = 0; from < n_lanes_; ++from) {
      const std::uint32_t one = latest_[from];
      if (from == lane || one == kNobody) continue;
      bool is_implied = false;
      for (std::size_t by = 0; by < n_lanes_ && !is_implied; ++by) {
        const std::uint32_t other = latest_[by];
        is_implied =
            by != from && other != kNobody && ended_[other * n_lanes_ + from] > position_[one];
      }
      if (!is_implied) needed_.push_back(one);
    }
    return needed_;
  }

  void remember(std::uint32_t launch, std::size_t lane) {
    std::uint32_t* const known = ended_.data() + launch * n_lanes_;
    std::fill(known, known + n_lanes_, 0);
    for (const std::uint32_t one : latest_) {
      if (one == kNobody) continue;
      for (std::size_t of = 0; of < n_lanes_; ++of) {
        known[of] = std::max(known[of], ended_[one * n_lanes_ + of]);
      }
    }
    position_[launch] = n_taken_[lane]++;
    known[lane] = n_taken_[lane];
    last_[lane] = launch;
  }

  const LaneProblem& problem_;
  const std::size_t n_, n_lanes_;
  std::vector<std::uint32_t> before_at_, before_;
  std::vector<std::uint32_t> position_;  // by launch: its position in its lane
  std::vector<std::uint32_t> ended_;     // by launch and lane: launches that have ended when it has
  std::vector<double> end_ns_;
  std::size_t n_waits_ = 0;
  std::vector<std::uint32_t> waits_for_;       // by launch: the launch at whose end it began
  std::vector<std::uint32_t> n_taken_, last_;  // by lane
  std::vector<std::uint32_t> latest_, needed_, joined_, held_;
};

// List scheduling: the end of a launch on each lane, as far as lanes are assigned.
class LaneList {
 public:
  LaneList(const LaneProblem& problem, const LaneTimes& times)
      : problem_(problem),
        times_(times),
        lanes_(problem.launch_ns.size(), kNobody),
        free_ns_(static_cast<std::size_t>(problem.n_lanes)),
        end_ns_(problem.launch_ns.size()) {}

  void place_earliest(std::uint32_t launch) {
    double ready_ns = 0;
    std::uint32_t behind = kNobody;  // its lane is preferred among equal ends
    for (const std::uint32_t one : times_.before(launch)) {
      if (lanes_[one] == kNobody) continue;
      if (behind == kNobody || end_ns_[one] >= ready_ns) behind = one;
      ready_ns = std::max(ready_ns, end_ns_[one]);
    }
    std::size_t chosen = behind == kNobody ? 0 : lanes_[behind];
    double least_ns = begin_ns(launch, chosen, ready_ns);
    for (std::size_t lane = 0; lane < free_ns_.size(); ++lane) {
      const double ns = begin_ns(launch, lane, ready_ns);
      if (ns < least_ns) {
        chosen = lane;
        least_ns = ns;
      }
    }
    place(launch, chosen, least_ns);
  }

  // On the lane of the first launch before it that is still the last of its lane.
  void place_in_chain(std::uint32_t launch) {
    std::size_t chosen = free_ns_.size();
    double ready_ns = 0;
    for (const std::uint32_t one : times_.before(launch)) {
      ready_ns = std::max(ready_ns, end_ns_[one]);
      if (chosen == free_ns_.size() && end_ns_[one] >= free_ns_[lanes_[one]]) chosen = lanes_[one];
    }
    if (chosen == free_ns_.size()) {
      chosen = static_cast<std::size_t>(std::min_element(free_ns_.begin(), free_ns_.end()) -
                                        free_ns_.begin());
    }
    place(launch, chosen, begin_ns(launch, chosen, ready_ns));
  }

  const Lanes& lanes() const { return lanes_; }

 private:
  double begin_ns(std::uint32_t launch, std::size_t lane, double ready_ns) const {
    std::uint64_t others = 0;
    for (const std::uint32_t one : times_.before(launch)) {
      if (lanes_[one] != kNobody && lanes_[one] != lane) others |= std::uint64_t{1} << lanes_[one];
    }
    double ns = std::max(free_ns_[lane], ready_ns);
    for (; others != 0; others &= others - 1) ns += problem_.synchronisation_ns;
    return ns;
  }

  void place(std::uint32_t launch, std::size_t lane, double begin_ns) {
    lanes_[launch] = static_cast<std::uint32_t>(lane);
    free_ns_[lane] = end_ns_[launch] = begin_ns + problem_.launch_ns[launch];
  }

  const LaneProblem& problem_;
  const LaneTimes& times_;
  Lanes lanes_;
  std::vector<double> free_ns_;  // by lane
  std::vector<double> end_ns_;   // by launch
};

// By launch, the longest chain that begins with it.
std::vector<double> upward_ranks(const LaneProblem& problem, const LaneTimes& times) {
  std::vector<double> behind(problem.launch_ns.size());
  std::vector<double> ranks(problem.launch_ns.size());
  for (std::size_t launch = ranks.size(); launch-- > 0;) {
    ranks[launch] = behind[launch] + problem.launch_ns[launch];
    for (const std::uint32_t one : times.before(launch)) {
      behind[one] = std::max(behind[one], ranks[launch]);
    }
  }
  return ranks;
}

struct Tried {
  Lanes lanes;
  double ns;
  std::size_t n_waits;
  const char* method;
};

Tried best_list(const LaneProblem& problem, LaneTimes& times, const std::vector<double>& ranks) {
  const std::size_t n = problem.launch_ns.size();
  Tried best{Lanes(n, 0), 0, 0, "one lane"};
  best.ns = times.run(best.lanes, nullptr);
  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::vector<std::uint32_t> by_rank(order);
  std::stable_sort(
      by_rank.begin(), by_rank.end(),
      [&ranks](std::uint32_t one, std::uint32_t other) { return ranks[one] > ranks[other]; });
  const auto consider = [&](const LaneList& list, const char* method) {
    const double ns = times.run(list.lanes(), nullptr);
    if (ns < best.ns) best = {list.lanes(), ns, times.n_waits(), method};
  };
  LaneList earliest(problem, times), ranked(problem, times), chains(problem, times);
  for (const std::uint32_t launch : order) earliest.place_earliest(launch);
  for (const std::uint32_t launch : by_rank) ranked.place_earliest(launch);
  for (const std::uint32_t launch : order) chains.place_in_chain(launch);
  consider(earliest, "earliest end");
  consider(ranked, "longest chain first");
  consider(chains, "chains");
  return best;
}

// Simulated annealing: launches change lanes, mostly consecutive ones of the critical path. Of
// equal durations the one with the fewest waits is best.
std::int64_t search(const LaneProblem& problem, LaneTimes& times, Tried& best, double bound_ns,
                    std::int64_t max_evaluations) {
  constexpr std::size_t kMostInARow = 4;
  constexpr double kOnPath = 0.8;
  // Temperatures as shares of the duration; the first falls with the number of launches above
  // kHotLaunches.
  constexpr double kHot = 0.1, kHotLaunches = 10, kCold = 0.001;
  const double hot =
      kHot * std::min(1.0, kHotLaunches / static_cast<double>(problem.launch_ns.size()));
  const double cooling =
      std::pow(std::min(1.0, kCold / hot),
               1.0 / static_cast<double>(std::max<std::int64_t>(1, max_evaluations)));
  double temperature = hot;
  Draws draws(0);
  Tried now = best;
  times.run(now.lanes, nullptr);
  std::vector<std::uint32_t> path = times.critical_path();
  std::int64_t n_evaluations = 0;
  for (; n_evaluations < max_evaluations && best.ns > bound_ns; ++n_evaluations) {
    Lanes lanes = now.lanes;
    const auto lane =
        static_cast<std::uint32_t>(draws.below(static_cast<std::size_t>(problem.n_lanes)));
    if (draws.fraction() < kOnPath) {
      const std::size_t first = draws.below(path.size());
      const std::size_t last = std::min(path.size(), first + 1 + draws.below(kMostInARow));
      for (std::size_t at = first; at < last; ++at) lanes[path[at]] = lane;
    } else {
      lanes[draws.below(lanes.size())] = lane;
    }
    const double ns = times.run(lanes, nullptr);
    temperature *= cooling;
    if (ns > now.ns - temperature * now.ns * std::log(1.0 - draws.fraction())) continue;
    now = {std::move(lanes), ns, times.n_waits(), "search"};
    path = times.critical_path();
    if (std::make_pair(ns, now.n_waits) < std::make_pair(best.ns, best.n_waits)) best = now;
  }
  return n_evaluations;
}

// Numbers lanes in the order of first use.
void number_lanes(Lanes& lanes) {
  std::vector<std::uint32_t> numbers(static_cast<std::size_t>(kMostLanes), kNobody);
  std::uint32_t n_used = 0;
  for (std::uint32_t& lane : lanes) {
    if (numbers[lane] == kNobody) numbers[lane] = n_used++;
    lane = numbers[lane];
  }
}

}  // namespace

LaneSchedule schedule_lanes(const LaneProblem& problem, std::int64_t max_evaluations) {
  check(problem);
  if (max_evaluations < 0) {
    throw PlanError("expected 0 evaluations or more, got " + std::to_string(max_evaluations));
  }
  LaneSchedule schedule;
  if (problem.launch_ns.empty()) {
    schedule.method = "nothing to run";
    return schedule;
  }
  LaneTimes times(problem);
  const std::vector<double> ranks = upward_ranks(problem, times);
  const double total_ns = std::accumulate(problem.launch_ns.begin(), problem.launch_ns.end(), 0.0);
  // Slightly less, since floating-point sums depend on their order.
  const double shared_ns = total_ns / static_cast<double>(problem.n_lanes) *
                           (1 - static_cast<double>(problem.launch_ns.size()) * 0x1p-52);
  schedule.lower_bound_ns = std::max(*std::max_element(ranks.begin(), ranks.end()) *
                                         (1 - static_cast<double>(ranks.size()) * 0x1p-52),
                                     shared_ns);
  Tried best = best_list(problem, times, ranks);
  if (problem.n_lanes > 1) {
    schedule.n_evaluations = search(problem, times, best, schedule.lower_bound_ns, max_evaluations);
  }
  number_lanes(best.lanes);
  schedule.predicted_ns = times.run(best.lanes, &schedule.waits);
  schedule.method = best.method;
  schedule.lanes.assign(best.lanes.begin(), best.lanes.end());
  schedule.joined.assign(times.joined().begin(), times.joined().end());
  schedule.held.assign(times.held().begin(), times.held().end());
  return schedule;
}

}  // namespace offload
