#include "offload/segment_dispatch.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

// A plan is replaced only where the new one is better by more than the error of estimates.
constexpr double kBetter = 0.98;

// Smaller changes of a pace since the latest plan lead to no new one.
constexpr double kChanged = 0.05;

// The least time between two plans for changed paces, for each segment and device: 20 times what
// planning took (4 us for 8 segments and 2 devices, bench/bench_dispatch.py on a 2-core machine).
constexpr double kBetweenPlans_ns = 5'000;

// Executions whose plans are revised in one step, the earliest first: bounds its duration.
constexpr int kMostRevised = 1;

// Executions that are looked at in one step, the earliest that have segments to begin: bounds its
// duration. Devices are busy with fewer, and what is behind them begins as these proceed.
constexpr std::size_t kMostConsidered = 16;

// The least time until a late device is looked at again.
constexpr double kLeastWait_ns = 50'000;

// The part of its lateness after which a late device is looked at again.
constexpr double kLater = 0.25;

constexpr double kThere = 0;

std::size_t index_of(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

SegmentDispatch::SegmentDispatch(SegmentGraph graph, ChoiceObjective objective)
    : prediction_(std::move(graph)),
      objective_(objective),
      running_(prediction_.graph().n_devices),
      link_free_ns_(prediction_.n_memories() * prediction_.n_memories(), 0) {}

std::int64_t SegmentDispatch::add(std::vector<std::int64_t> devices) {
  prediction_.check_choice(devices);
  Execution one;
  one.number = n_added_++;
  one.devices = std::move(devices);
  one.n_waiting = one.n_open = prediction_.n_segments();
  one.states.assign(one.n_waiting, State::kWaiting);
  for (const auto& before : prediction_.graph().after) one.n_left.push_back(before.size());
  one.there_ns.assign(prediction_.graph().values.size() * prediction_.n_memories(), kNotThere);
  for (const std::uint32_t value : prediction_.made(kCaller)) {
    one.there_ns[value * prediction_.n_memories() + index_of(prediction_.graph().home)] = kThere;
  }
  executions_.push_back(std::move(one));
  return executions_.back().number;
}

SegmentDispatch::Execution& SegmentDispatch::find(std::int64_t execution) {
  const auto found = std::lower_bound(
      executions_.begin(), executions_.end(), execution,
      [](const Execution& one, std::int64_t number) { return one.number < number; });
  if (found == executions_.end() || found->number != execution) {
    throw PlanError("execution " + std::to_string(execution) + " is not under way");
  }
  return *found;
}

const std::vector<std::int64_t>& SegmentDispatch::devices(std::int64_t execution) {
  return find(execution).devices;
}

void SegmentDispatch::segment_ended(std::int64_t execution, std::int64_t segment) {
  Execution& one = find(execution);
  if (segment < 0 || index_of(segment) >= one.states.size() ||
      one.states[index_of(segment)] != State::kRunning) {
    throw PlanError("segment " + std::to_string(segment) + " ended without having begun");
  }
  const std::size_t device = index_of(one.devices[index_of(segment)]);
  running_[device] = {};
  one.states[index_of(segment)] = State::kEnded;
  --one.n_open;
  for (const std::uint32_t behind : prediction_.behind(index_of(segment))) --one.n_left[behind];
  const std::size_t memory = index_of(prediction_.graph().memory_of[device]);
  for (const std::uint32_t value : prediction_.made(segment)) {
    one.there_ns[value * prediction_.n_memories() + memory] = kThere;
    one.may_copy = true;
  }
}

void SegmentDispatch::copy_ended(std::int64_t execution, std::int64_t to,
                                 const std::vector<std::int64_t>& values) {
  Execution& one = find(execution);
  for (const std::int64_t value : values) {
    const std::size_t at = index_of(value) * prediction_.n_memories() + index_of(to);
    if (value < 0 || to < 0 || index_of(to) >= prediction_.n_memories() ||
        at >= one.there_ns.size() || one.there_ns[at] <= kThere) {
      throw PlanError("a copy ended without having begun");
    }
    one.there_ns[at] = kThere;
  }
  --one.n_open;
}

void SegmentDispatch::abandon(std::int64_t execution) {
  Execution& one = find(execution);
  if (one.is_abandoned) return;
  one.is_abandoned = true;
  one.n_open -= one.n_waiting;
  one.n_waiting = 0;
}

double SegmentDispatch::cost_ns(std::int64_t segment, std::size_t device) const {
  return prediction_.graph().costs_ns[index_of(segment) * running_.size() + device] *
         paces_[device];
}

// The time until a device ends what it has begun.
double SegmentDispatch::left_ns(std::size_t device) const {
  if (is_idle(device)) return 0;
  const Running& one = running_[device];
  return std::abs(one.begin_ns + cost_ns(one.segment, device) - now_ns_);
}

bool SegmentDispatch::is_ready(const Execution& one, std::size_t segment) const {
  if (one.states[segment] != State::kWaiting || one.n_left[segment] != 0) return false;
  const std::size_t memory =
      index_of(prediction_.graph().memory_of[index_of(one.devices[segment])]);
  const auto& read = prediction_.read(segment);
  return std::all_of(read.begin(), read.end(), [&](std::uint32_t value) {
    return one.there_ns[value * prediction_.n_memories() + memory] == kThere;
  });
}

std::vector<DispatchCommand> SegmentDispatch::next(const std::vector<double>& paces,
                                                   double now_ns) {
  prediction_.check_loads({paces, std::vector<double>(paces.size(), 0)});
  paces_ = paces;
  now_ns_ = now_ns;
  commands_.clear();
  int n_revised = 0;
  consider();
  for (std::size_t at = 0; at < n_considered_; ++at) {
    Execution& one = executions_[at];
    if (one.n_waiting == 0) continue;
    if (one.paces.empty()) one.paces = paces_;
    bool has_changed = false;
    for (std::size_t device = 0; device < paces_.size(); ++device) {
      const double before = one.paces[device];
      has_changed |= std::abs(paces_[device] - before) > kChanged * before;
    }
    if (!has_changed || now_ns_ < plan_again_ns_ || n_revised++ >= kMostRevised) continue;
    const auto n_choices = static_cast<double>(one.states.size() * paces_.size());
    plan_again_ns_ = now_ns_ + kBetweenPlans_ns * n_choices;
    revise(one);
  }
  carry_out();
  revise_for_idle();
  end();
  return std::move(commands_);
}

// An execution that is considered stays so until it has ended.
void SegmentDispatch::consider() {
  n_considered_ = 0;
  for (std::size_t n_waiting = 0; n_considered_ < executions_.size() && n_waiting < kMostConsidered;
       ++n_considered_) {
    n_waiting += executions_[n_considered_].n_waiting > 0;
  }
}

void SegmentDispatch::carry_out() {
  for (std::size_t at = 0; at < n_considered_; ++at) copy(executions_[at]);
  for (std::size_t at = 0; at < n_considered_; ++at) begin(executions_[at]);
}

// Copies what has been made to where it is read, and is not on its way.
void SegmentDispatch::copy(Execution& one) {
  if (!one.may_copy || one.is_abandoned || prediction_.n_memories() == 1) return;
  one.may_copy = false;
  copy_made(one, kCaller);
  for (std::size_t at = 0; at < one.states.size(); ++at) {
    if (one.states[at] == State::kEnded) copy_made(one, static_cast<std::int64_t>(at));
  }
}

bool SegmentDispatch::is_wanted(const Execution& one, std::uint32_t value, std::size_t to) const {
  const SegmentGraph& graph = prediction_.graph();
  const SharedValues& shared = graph.values[value];
  if (one.there_ns[value * prediction_.n_memories() + to] != kNotThere) return false;
  if (shared.is_returned && to == index_of(graph.home)) return true;
  return std::any_of(shared.readers.begin(), shared.readers.end(), [&](std::int64_t reader) {
    const std::size_t at = index_of(reader);
    return one.states[at] == State::kWaiting &&
           index_of(graph.memory_of[index_of(one.devices[at])]) == to;
  });
}

void SegmentDispatch::copy_made(Execution& one, std::int64_t producer) {
  const SegmentGraph& graph = prediction_.graph();
  const std::int64_t from =
      producer == kCaller ? graph.home : graph.memory_of[index_of(one.devices[index_of(producer)])];
  for (std::size_t to = 0; to < prediction_.n_memories(); ++to) {
    if (to == index_of(from)) continue;
    std::vector<std::int64_t> values;
    double size_bytes = 0;
    for (const std::uint32_t value : prediction_.made(producer)) {
      if (!is_wanted(one, value, to)) continue;
      values.push_back(value);
      size_bytes += graph.values[value].size_bytes;
    }
    if (values.empty()) continue;
    double& free_ns = link_free_ns_[index_of(from) * prediction_.n_memories() + to];
    free_ns = std::max(free_ns, now_ns_) + prediction_.copy_ns(index_of(from), to, size_bytes);
    for (const std::int64_t value : values) {
      // Not 0, which says that it is there.
      one.there_ns[index_of(value) * prediction_.n_memories() + to] = std::max(free_ns, 1.0);
    }
    ++one.n_open;
    commands_.push_back({DispatchCommand::Kind::kCopy, one.number, producer,
                         static_cast<std::int64_t>(to), std::move(values)});
  }
}

// Begins what is ready on devices that are idle.
void SegmentDispatch::begin(Execution& one) {
  for (std::size_t at = 0; at < one.states.size() && one.n_waiting > 0; ++at) {
    const std::size_t device = index_of(one.devices[at]);
    if (!is_idle(device) || !is_ready(one, at)) continue;
    const auto segment = static_cast<std::int64_t>(at);
    running_[device] = {one.number, segment, now_ns_};
    one.states[at] = State::kRunning;
    --one.n_waiting;
    commands_.push_back({DispatchCommand::Kind::kBegin, one.number, segment, one.devices[at], {}});
  }
}

// Forgets executions of which nothing is left.
void SegmentDispatch::end() {
  const auto last = executions_.begin() + static_cast<std::ptrdiff_t>(n_considered_);
  const auto first_ended = std::remove_if(executions_.begin(), last, [&](const Execution& one) {
    if (one.n_open != 0) return false;
    commands_.push_back({DispatchCommand::Kind::kEnd, one.number, 0, 0, {}});
    return true;
  });
  executions_.erase(first_ended, last);
}

// The work of devices before an execution: what they do, and what waits of earlier executions.
DeviceLoads SegmentDispatch::loads_for(const Execution& one) const {
  DeviceLoads loads{paces_, std::vector<double>(running_.size())};
  for (std::size_t device = 0; device < running_.size(); ++device) {
    loads.free_ns[device] = left_ns(device);
  }
  for (const Execution& earlier : executions_) {
    if (earlier.number >= one.number) break;
    if (earlier.n_waiting == 0) continue;
    for (std::size_t at = 0; at < earlier.states.size(); ++at) {
      if (earlier.states[at] != State::kWaiting) continue;
      const std::size_t device = index_of(earlier.devices[at]);
      loads.free_ns[device] += cost_ns(static_cast<std::int64_t>(at), device);
    }
  }
  return loads;
}

SegmentProgress SegmentDispatch::progress_of(const Execution& one) const {
  const auto from_now = [&](double ns) { return std::max(0.0, ns - now_ns_); };
  SegmentProgress progress;
  progress.ends_ns.assign(one.states.size(), kNotBegun);
  for (std::size_t at = 0; at < one.states.size(); ++at) {
    if (one.states[at] == State::kEnded) progress.ends_ns[at] = 0;
    if (one.states[at] == State::kRunning) {
      progress.ends_ns[at] = left_ns(index_of(one.devices[at]));
    }
  }
  progress.present_ns = one.there_ns;
  for (double& ns : progress.present_ns) ns = ns == kNotThere ? kNotThere : from_now(ns);
  for (const double ns : link_free_ns_) progress.link_free_ns.push_back(from_now(ns));
  return progress;
}

// Plans what has not begun once more; returns whether the plan has changed.
bool SegmentDispatch::revise(Execution& one) {
  one.paces = paces_;
  const DeviceLoads loads = loads_for(one);
  const SegmentProgress progress = progress_of(one);
  double least = kBetter * prediction_.value(one.devices, loads, objective_, progress);
  std::vector<std::int64_t> found;
  for (auto& devices : prediction_.alternatives(loads, one.devices, progress)) {
    const double value = prediction_.value(devices, loads, objective_, progress);
    if (!(value < least)) continue;
    least = value;
    found = std::move(devices);
  }
  if (found.empty()) return false;
  for (std::size_t at = 0; at < found.size(); ++at) n_moved_ += found[at] != one.devices[at];
  one.devices = std::move(found);
  one.may_copy = true;
  return true;
}

// Whether a segment that waits for its device may go to an idle one. If not now, notes when to look
// again: while its device is late, its end there moves away twice as fast as the present.
bool SegmentDispatch::is_better_elsewhere(const Execution& one, std::size_t segment) {
  const std::size_t present = index_of(one.devices[segment]);
  const std::int64_t at = static_cast<std::int64_t>(segment);
  const double expected_ns = left_ns(present) + cost_ns(at, present);
  const Running& busy = running_[present];
  const double late_ns = now_ns_ - (busy.begin_ns + cost_ns(busy.segment, present));
  bool is_better = false;
  for (std::size_t device = 0; device < running_.size(); ++device) {
    if (!is_idle(device) || !prediction_.can_run(segment, device)) continue;
    const std::size_t memory = index_of(prediction_.graph().memory_of[device]);
    double missing_bytes = 0;
    bool is_missing = false;
    for (const std::uint32_t value : prediction_.read(segment)) {
      if (one.there_ns[value * prediction_.n_memories() + memory] != kNotThere) continue;
      missing_bytes += prediction_.graph().values[value].size_bytes;
      is_missing = true;
    }
    const std::size_t from = index_of(prediction_.graph().memory_of[present]);
    const double copy_ns =
        is_missing && from != memory ? prediction_.copy_ns(from, memory, missing_bytes) : 0;
    const double there_ns = copy_ns + cost_ns(at, device);
    is_better |= there_ns < kBetter * expected_ns;
    const double gap_ns = std::max(0.0, there_ns - kBetter * expected_ns);
    const double wait_ns = gap_ns + (late_ns < 0 ? -2 * late_ns : kLater * late_ns);
    wake_at_ns_ = std::min(wake_at_ns_, now_ns_ + std::max(wait_ns, kLeastWait_ns));
  }
  return is_better;
}

// Gives idle devices what waits for busy ones.
void SegmentDispatch::revise_for_idle() {
  wake_at_ns_ = std::numeric_limits<double>::infinity();
  int n_revised = 0;
  for (std::size_t place = 0; place < n_considered_; ++place) {
    if (n_revised >= kMostRevised) return;
    Execution& one = executions_[place];
    bool is_due = false;
    for (std::size_t at = 0; at < one.states.size() && one.n_waiting > 0; ++at) {
      if (!is_ready(one, at) || is_idle(index_of(one.devices[at]))) continue;
      is_due = is_better_elsewhere(one, at) || is_due;
    }
    if (!is_due) continue;
    ++n_revised;
    if (revise(one)) carry_out();
  }
}

}  // namespace offload
