#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string>
#include <unordered_map>

#include "offload/errors.hpp"
#include "offload/steps.hpp"

namespace offload {
namespace {

constexpr int kLeastExecutions = 3;
constexpr int kMostExecutions = 16;
constexpr double kSettled = 1e-9;

bool agree(double one, double other) { return std::abs(one - other) <= kSettled * std::abs(one); }

[[noreturn]] void refuse(const LaneStep& step, const std::string& why) {
  static constexpr const char* kNames[] = {"run", "copy", "record", "wait"};
  const auto kind = static_cast<std::size_t>(step.kind);
  throw PlanError("step " + (kind < std::size(kNames) ? kNames[kind] : std::to_string(kind)) + "(" +
                  std::to_string(step.first) + ", " + std::to_string(step.second) + "): " + why);
}

// When an event was recorded, in this execution and in the one before.
struct EventTimes {
  double now = 0;
  double before = 0;
  bool is_known = false;   // in this execution
  bool was_known = false;  // before
};

struct Times {
  std::vector<double> begin_ns;
  std::vector<double> end_ns;
};

class Simulation {
 public:
  Simulation(const std::vector<LaneSteps>& lanes, const std::vector<double>& launch_ns,
             const std::vector<double>& copy_ns)
      : lanes_(lanes), launch_ns_(launch_ns), copy_ns_(copy_ns), free_ns_(lanes.size()) {
    launches_.begin_ns.resize(launch_ns.size());
    launches_.end_ns.resize(launch_ns.size());
    check();
    std::size_t n_copies = 0;
    for (const LaneSteps& lane : lanes_) {
      first_copy_.push_back(n_copies);
      n_copies +=
          static_cast<std::size_t>(std::count_if(lane.begin(), lane.end(), [](const LaneStep& one) {
            return one.kind == StepKind::kCopy;
          }));
    }
    copies_ = {std::vector<double>(n_copies), std::vector<double>(n_copies)};
    ahead_.resize(n_copies);
  }

  SimulatedSteps run() {
    copy_ahead();
    double period_ns = 0;
    double copied_at_ns = 0;
    for (int number = 0; number < kMostExecutions; ++number) {
      const double begin_ns = end_ns_;
      const Times before = copies_;
      const std::vector<double> free_before_ns = free_ns_;
      execute();
      const double last_ns = period_ns;
      period_ns = end_ns_ - begin_ns;
      const double last_copied_ns = copied_at_ns;
      copied_at_ns = copied_ns(before);
      const bool is_settled = agree(period_ns, last_ns) &&
                              have_settled(free_before_ns, period_ns) &&
                              (ahead_.empty() || agree(period_ns, copied_at_ns - last_copied_ns));
      if (number + 1 == kMostExecutions || (number + 1 >= kLeastExecutions && is_settled)) {
        return found(begin_ns, before, period_ns);
      }
    }
    return {};  // not reached
  }

 private:
  void check() {
    std::vector<bool> runs(launch_ns_.size());
    for (const LaneSteps& lane : lanes_) {
      for (const LaneStep& one : lane) check(one, runs);
    }
    for (const LaneSteps& lane : lanes_) {
      for (const LaneStep& one : lane) {
        if (one.kind == StepKind::kWait && events_.count(one.first) == 0) {
          refuse(one, "nothing records its event");
        }
      }
    }
  }

  void check(const LaneStep& one, std::vector<bool>& runs) {
    const auto n_launches = static_cast<std::int64_t>(launch_ns_.size());
    const auto n_pieces = static_cast<std::int64_t>(copy_ns_.size());
    const bool is_age = one.second == 0 || one.second == 1;
    switch (one.kind) {
      case StepKind::kRun:
        if (one.first < 0 || one.first > one.second || one.second > n_launches) {
          refuse(one, "there are " + std::to_string(n_launches) + " launches");
        }
        for (std::int64_t at = one.first; at < one.second; ++at) {
          if (runs[static_cast<std::size_t>(at)]) refuse(one, "a launch is run twice");
          runs[static_cast<std::size_t>(at)] = true;
        }
        return;
      case StepKind::kCopy:
        if (one.first < 0 || one.first >= n_pieces || !is_age) {
          refuse(one, "there are " + std::to_string(n_pieces) + " pieces");
        }
        return;
      case StepKind::kRecord:
        if (!events_.try_emplace(one.first).second) refuse(one, "its event is recorded twice");
        return;
      case StepKind::kWait:
        if (!is_age) refuse(one, "an event is of this execution or the one before");
        return;
    }
    refuse(one, "there is no such kind");
  }

  // Performs the copies that the first execution takes from the one before it.
  void copy_ahead() {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      std::size_t copy = first_copy_[lane];
      bool is_ahead = false;
      for (const LaneStep& one : lanes_[lane]) {
        if (one.kind == StepKind::kCopy) {
          is_ahead = one.second == 1;
          if (is_ahead) act(lane, copy_ns_[static_cast<std::size_t>(one.first)], copies_, copy);
          ++copy;
        } else if (is_ahead && one.kind == StepKind::kRecord) {
          events_[one.first].now = free_ns_[lane];
          events_[one.first].is_known = true;
        }
      }
    }
  }

  // When the last copy that the latest execution read has ended.
  double copied_ns(const Times& before) const {
    double latest_ns = 0;
    for (std::size_t at = 0; at < ahead_.size(); ++at) {
      latest_ns = std::max(latest_ns, ahead_[at] ? before.end_ns[at] : copies_.end_ns[at]);
    }
    return latest_ns;
  }

  // Whether all lanes without copies ended `period_ns` later than in the execution before.
  bool have_settled(const std::vector<double>& before_ns, double period_ns) const {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      const bool has_copies =
          first_copy_[lane] < (lane + 1 < lanes_.size() ? first_copy_[lane + 1] : ahead_.size());
      if (lanes_[lane].empty() || has_copies) continue;
      if (!agree(period_ns, free_ns_[lane] - before_ns[lane])) return false;
    }
    return true;
  }

  void execute() {
    for (auto& event : events_) {
      event.second.before = event.second.now;
      event.second.was_known = event.second.is_known;
      event.second.is_known = false;
    }
    std::vector<std::size_t> at(lanes_.size(), 0);
    std::vector<std::size_t> copy = first_copy_;
    std::size_t n_left = lanes_.size();
    while (n_left > 0) {
      n_left = 0;
      bool has_moved = false;
      for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
        while (at[lane] < lanes_[lane].size() && step(lane, lanes_[lane][at[lane]], copy[lane])) {
          ++at[lane];
          has_moved = true;
        }
        if (at[lane] < lanes_[lane].size()) ++n_left;
      }
      if (n_left > 0 && !has_moved) throw PlanError("lanes wait for one another");
    }
    end_ns_ = launches_.end_ns.empty()
                  ? end_ns_
                  : *std::max_element(launches_.end_ns.begin(), launches_.end_ns.end());
  }

  // Returns false if the step must wait.
  bool step(std::size_t lane, const LaneStep& one, std::size_t& copy) {
    switch (one.kind) {
      case StepKind::kRun:
        for (auto at = static_cast<std::size_t>(one.first);
             at < static_cast<std::size_t>(one.second); ++at) {
          act(lane, launch_ns_[at], launches_, at);
        }
        return true;
      case StepKind::kCopy:
        ahead_[copy] = one.second == 1;
        act(lane, copy_ns_[static_cast<std::size_t>(one.first)], copies_, copy++);
        return true;
      case StepKind::kRecord:
        events_[one.first].now = free_ns_[lane];
        events_[one.first].is_known = true;
        return true;
      case StepKind::kWait: {
        const EventTimes& event = events_[one.first];
        if (one.second == 0 && !event.is_known) return false;
        const double time = one.second == 0 ? event.now : event.was_known ? event.before : 0.0;
        free_ns_[lane] = std::max(free_ns_[lane], time);
        return true;
      }
    }
    return true;
  }

  void act(std::size_t lane, double duration_ns, Times& times, std::size_t at) {
    times.begin_ns[at] = free_ns_[lane];
    free_ns_[lane] += duration_ns;
    times.end_ns[at] = free_ns_[lane];
  }

  SimulatedSteps found(double begin_ns, const Times& before, double period_ns) const {
    SimulatedSteps result{period_ns, launches_.begin_ns, launches_.end_ns, copies_.begin_ns,
                          copies_.end_ns};
    for (std::size_t at = 0; at < ahead_.size(); ++at) {
      if (!ahead_[at]) continue;
      result.copy_begin_ns[at] = before.begin_ns[at];
      result.copy_end_ns[at] = before.end_ns[at];
    }
    for (std::vector<double>* times : {&result.launch_begin_ns, &result.launch_end_ns,
                                       &result.copy_begin_ns, &result.copy_end_ns}) {
      for (double& time : *times) time -= begin_ns;
    }
    return result;
  }

  const std::vector<LaneSteps>& lanes_;
  const std::vector<double>& launch_ns_;
  const std::vector<double>& copy_ns_;
  std::vector<double> free_ns_;  // by lane
  std::unordered_map<std::int64_t, EventTimes> events_;
  std::vector<std::size_t> first_copy_;  // by lane
  std::vector<bool> ahead_;              // by copy
  Times launches_;
  Times copies_;
  double end_ns_ = 0;  // of the last launch
};

}  // namespace

SimulatedSteps simulate_steps(const std::vector<LaneSteps>& lanes,
                              const std::vector<double>& launch_ns,
                              const std::vector<double>& copy_ns) {
  return Simulation(lanes, launch_ns, copy_ns).run();
}

}  // namespace offload
