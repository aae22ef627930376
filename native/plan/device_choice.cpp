#include "offload/device_choice.hpp"

#include <algorithm>
#include <utility>

#include "task_problem.hpp"

namespace offload {
namespace {

// A smaller relative gain is a rounding error.
constexpr double kGain = 1e-9;

// The limit of a search.
constexpr std::int64_t kEvaluationsPerSegment = 100;

// Longer runs of segments are only moved as a whole: neighbours stay proportional to segments.
constexpr std::size_t kLongestRun = 8;
constexpr std::size_t kFarthestExchange = 16;

std::size_t index_of(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

DeviceSearch::DeviceSearch(SegmentGraph graph) : prediction_(std::move(graph)) {
  lay_out_neighbours();
}

double DeviceSearch::value(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
                           ChoiceObjective objective) {
  prediction_.check_choice(devices);
  prediction_.check_loads(loads);
  return prediction_.value(devices, loads, objective);
}

const std::vector<double>& DeviceSearch::freed(const std::vector<std::int64_t>& devices,
                                               const DeviceLoads& loads) {
  value(devices, loads, ChoiceObjective::kLatency);
  return prediction_.freed_ns();
}

// In the order in which they are tried: single segments, exchanges, and segments with one that they
// wait for; then consecutive ones.
void DeviceSearch::lay_out_neighbours() {
  std::vector<bool> is_movable(prediction_.n_segments());
  for (std::size_t at = 0; at < prediction_.n_segments(); ++at) {
    const auto row = prediction_.graph().costs_ns.begin() +
                     static_cast<std::ptrdiff_t>(at * prediction_.graph().n_devices);
    const auto end = row + static_cast<std::ptrdiff_t>(prediction_.graph().n_devices);
    is_movable[at] = std::count_if(row, end, [](double cost_ns) { return cost_ns >= 0; }) > 1;
  }
  const auto add = [&](Neighbour::Kind kind, std::size_t first, std::size_t last) {
    if (!is_movable[first] || !is_movable[last]) return;
    const std::size_t n_devices = kind == Neighbour::kExchange ? 1 : prediction_.graph().n_devices;
    for (std::size_t device = 0; device < n_devices; ++device) {
      if (kind != Neighbour::kExchange &&
          !(prediction_.can_run(first, device) && prediction_.can_run(last, device))) {
        continue;
      }
      neighbours_.push_back({kind, static_cast<std::uint32_t>(first),
                             static_cast<std::uint32_t>(last), static_cast<std::int64_t>(device)});
    }
  };
  for (std::size_t at = 0; at < prediction_.n_segments(); ++at) add(Neighbour::kRun, at, at);
  for (std::size_t first = 0; first < prediction_.n_segments(); ++first) {
    const std::size_t end = std::min(prediction_.n_segments(), first + kFarthestExchange);
    for (std::size_t last = first + 1; last < end; ++last) add(Neighbour::kExchange, first, last);
  }
  for (std::size_t at = 0; at < prediction_.n_segments(); ++at) {
    for (const std::int64_t before : prediction_.graph().after[at])
      add(Neighbour::kPair, index_of(before), at);
  }
  for (std::size_t length = 2; length <= std::min(kLongestRun, prediction_.n_segments());
       ++length) {
    for (std::size_t first = 0; first + length <= prediction_.n_segments(); ++first) {
      add(Neighbour::kRun, first, first + length - 1);
    }
  }
}

void DeviceSearch::begin(const std::vector<std::vector<std::int64_t>>& choices,
                         const DeviceLoads& loads, ChoiceObjective objective) {
  prediction_.check_loads(loads);
  for (const std::vector<std::int64_t>& one : choices) prediction_.check_choice(one);
  loads_ = loads;
  objective_ = objective;
  starts_ = choices;
  for (std::vector<std::int64_t>& one : prediction_.alternatives(loads_)) {
    starts_.push_back(std::move(one));
  }
  found_ = starts_.front();
  found_value_ = prediction_.value(found_, loads_, objective_);
  for (const std::vector<std::int64_t>& one : starts_) {
    const double value = prediction_.value(one, loads_, objective_);
    if (value < found_value_ * (1 - kGain)) {
      found_ = one;
      found_value_ = value;
    }
  }
  n_restarts_ = 0;
  n_left_ = neighbours_.empty()
                ? 0
                : kEvaluationsPerSegment * static_cast<std::int64_t>(prediction_.n_segments());
  present_ = found_;
  present_value_ = found_value_;
  next_ = n_vain_ = next_start_ = 0;
}

// Begins again from another start, or from what was found, with some consecutive segments moved.
void DeviceSearch::restart() {
  next_ = n_vain_ = 0;
  if (next_start_ < starts_.size()) {
    present_ = starts_[next_start_++];
  } else {
    present_ = found_;
    // Every second time all segments: some optima are far from one another.
    const bool is_all = n_restarts_ % 2 == 1;
    Draws draws(n_restarts_++);
    const std::size_t first = is_all ? 0 : draws.below(prediction_.n_segments());
    const std::size_t end =
        is_all ? prediction_.n_segments()
               : std::min(prediction_.n_segments(), first + 2 + draws.below(kLongestRun));
    for (std::size_t at = first; at < end; ++at) {
      const std::size_t device = draws.below(prediction_.graph().n_devices);
      if (prediction_.can_run(at, device)) present_[at] = static_cast<std::int64_t>(device);
    }
  }
  present_value_ = prediction_.value(present_, loads_, objective_);
}

// Whether it is another choice that the devices have.
bool DeviceSearch::apply(const Neighbour& one, std::vector<std::int64_t>& devices) const {
  const std::int64_t first = devices[one.first];
  const std::int64_t last = devices[one.last];
  if (one.kind == Neighbour::kExchange) {
    if (first == last || !prediction_.can_run(one.first, index_of(last)) ||
        !prediction_.can_run(one.last, index_of(first))) {
      return false;
    }
    std::swap(devices[one.first], devices[one.last]);
    return true;
  }
  // Where an end is on the device already it is a smaller neighbour.
  if (first == one.device || last == one.device) return false;
  devices[one.first] = devices[one.last] = one.device;
  for (std::size_t at = one.first; one.kind == Neighbour::kRun && at < one.last; ++at) {
    if (prediction_.can_run(at, index_of(one.device))) devices[at] = one.device;
  }
  return true;
}

bool DeviceSearch::improve(std::int64_t max_evaluations) {
  const std::int64_t n_kept = std::max<std::int64_t>(0, n_left_ - max_evaluations);
  while (n_left_ > n_kept) {
    if (n_vain_ >= neighbours_.size()) {
      restart();
      --n_left_;
    }
    const Neighbour& one = neighbours_[next_];
    next_ = next_ + 1 < neighbours_.size() ? next_ + 1 : 0;
    ++n_vain_;
    attempt_ = present_;
    if (!apply(one, attempt_)) continue;
    --n_left_;
    const double value = prediction_.value(attempt_, loads_, objective_);
    if (!(value < present_value_ * (1 - kGain))) continue;
    present_value_ = value;
    std::swap(present_, attempt_);
    n_vain_ = 0;
    if (value < found_value_ * (1 - kGain)) {
      found_value_ = value;
      found_ = present_;
    }
  }
  return n_left_ <= 0;
}

}  // namespace offload
