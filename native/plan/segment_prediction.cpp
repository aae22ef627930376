#include "offload/segment_prediction.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw PlanError(why); }

bool is_amount(double number) { return number >= 0 && std::isfinite(number); }

std::size_t index_of(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

SegmentPrediction::SegmentPrediction(SegmentGraph graph)
    : graph_(std::move(graph)), n_segments_(graph_.after.size()), n_memories_(0) {
  for (const std::int64_t memory : graph_.memory_of) {
    if (memory < 0) refuse("expected memories to be numbered from 0 on");
    n_memories_ = std::max(n_memories_, index_of(memory) + 1);
  }
  check_graph();
  check_numbers();
  check_values();
  std::stable_sort(graph_.values.begin(), graph_.values.end(),
                   [](const SharedValues& one, const SharedValues& other) {
                     return one.producer < other.producer;
                   });
  made_.resize(n_segments_ + 1);
  read_.resize(n_segments_);
  for (std::uint32_t at = 0; at < graph_.values.size(); ++at) {
    const SharedValues& one = graph_.values[at];
    made_[index_of(one.producer + 1)].push_back(at);
    for (const std::int64_t reader : one.readers) read_[index_of(reader)].push_back(at);
  }
  behind_.resize(n_segments_);
  for (std::uint32_t at = 0; at < n_segments_; ++at) {
    for (const std::int64_t before : graph_.after[at]) behind_[index_of(before)].push_back(at);
  }
}

void SegmentPrediction::check_graph() const {
  const std::size_t p = graph_.n_devices;
  if (p == 0 || graph_.memory_of.size() != p) refuse("expected the memory of each device");
  if (graph_.costs_ns.size() != n_segments_ * p) {
    refuse("expected a cost for each segment and device");
  }
  if (graph_.home < 0 || index_of(graph_.home) >= n_memories_) {
    refuse("expected the caller's memory to be a device's");
  }
  if (graph_.links.size() != n_memories_ * n_memories_) {
    refuse("expected a link between any two memories");
  }
  for (std::size_t at = 0; at < n_segments_; ++at) {
    for (const std::int64_t before : graph_.after[at]) {
      if (before < 0 || index_of(before) >= at)
        refuse("a segment waits for one that is not earlier");
    }
  }
}

void SegmentPrediction::check_numbers() const {
  if (!is_amount(graph_.hand_over_ns)) refuse("expected a hand-over of 0 ns or more");
  for (std::size_t at = 0; at < n_segments_; ++at) {
    bool is_able = false;
    for (std::size_t device = 0; device < graph_.n_devices; ++device) {
      const double cost_ns = graph_.costs_ns[at * graph_.n_devices + device];
      if (!is_amount(cost_ns) && cost_ns != static_cast<double>(kCannotRun)) {
        refuse("expected costs of 0 ns or more");
      }
      is_able = is_able || cost_ns >= 0;
    }
    if (!is_able) refuse("no device has segment " + std::to_string(at));
  }
  for (const ProcessorLink& one : graph_.links) {
    if (!is_amount(one.overhead_ns) || !(one.bytes_per_second > 0)) {
      refuse("expected links with an overhead of 0 ns or more and a bandwidth");
    }
  }
}

void SegmentPrediction::check_values() const {
  const auto n_segments = static_cast<std::int64_t>(n_segments_);
  for (const SharedValues& one : graph_.values) {
    if (one.producer < kCaller || one.producer >= n_segments || !is_amount(one.size_bytes)) {
      refuse("expected values with a producer and 0 bytes or more");
    }
    std::int64_t last = one.producer;
    for (const std::int64_t reader : one.readers) {
      if (reader <= last || reader >= n_segments) {
        refuse("expected readers behind the producer, ascending");
      }
      last = reader;
    }
  }
}

void SegmentPrediction::check_choice(const std::vector<std::int64_t>& devices) const {
  if (devices.size() != n_segments_) refuse("expected a device for each segment");
  for (std::size_t at = 0; at < n_segments_; ++at) {
    const std::int64_t device = devices[at];
    if (device < 0 || index_of(device) >= graph_.n_devices || !can_run(at, index_of(device))) {
      refuse("device " + std::to_string(device) + " does not have segment " + std::to_string(at));
    }
  }
}

void SegmentPrediction::check_loads(const DeviceLoads& loads) const {
  const auto fits = [&](const std::vector<double>& numbers) {
    return numbers.size() == graph_.n_devices &&
           std::all_of(numbers.begin(), numbers.end(), is_amount);
  };
  if (!fits(loads.paces) || !fits(loads.free_ns)) {
    refuse("expected a pace and a time of 0 or more for each device");
  }
}

double SegmentPrediction::copy_ns(std::size_t from, std::size_t to, double size_bytes) const {
  const ProcessorLink& link = graph_.links[from * n_memories_ + to];
  return link.overhead_ns + size_bytes * 1e9 / link.bytes_per_second;
}

// Executes in virtual time: a device takes segments in the order in which they are ready, as the
// executor does, and a direction copies in the order in which their producers have ended.
double SegmentPrediction::value(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
                                ChoiceObjective objective, const SegmentProgress& progress) {
  begin(loads, progress);
  busy_ns_ = free_ns_;
  arrivals_ns_.assign(n_segments_, 0);
  link_busy_ns_ = link_free_ns_;
  returned_ns_ = 0;
  events_.clear();
  count_waits(devices);
  send(kCaller, 0, devices);
  double latency_ns = 0;
  while (!events_.empty()) {
    std::pop_heap(events_.begin(), events_.end());
    const Event event = events_.back();
    events_.pop_back();
    const std::int64_t device = devices[event.segment];
    if (event.has_ended) {
      latency_ns = std::max(latency_ns, event.ns);
      send(event.segment, event.ns, devices);
      for (const std::uint32_t one : behind_[event.segment]) {
        arrive(one, event.ns + (devices[one] == device ? 0 : graph_.hand_over_ns));
      }
      continue;
    }
    const std::size_t at = index_of(device);
    const double took_ns = graph_.costs_ns[event.segment * graph_.n_devices + at] * loads.paces[at];
    free_ns_[at] = std::max(free_ns_[at], event.ns) + took_ns;
    busy_ns_[at] += took_ns;
    add_event({free_ns_[at], event.segment, /*has_ended=*/true});
  }
  if (objective == ChoiceObjective::kLatency) return std::max(latency_ns, returned_ns_);
  const double device_ns = *std::max_element(busy_ns_.begin(), busy_ns_.end());
  const double link_ns = *std::max_element(link_busy_ns_.begin(), link_busy_ns_.end());
  return std::max(device_ns, link_ns);
}

bool SegmentPrediction::has_begun(std::size_t segment) const {
  return !progress_->ends_ns.empty() && progress_->ends_ns[segment] != kNotBegun;
}

// Takes the state at time 0.
void SegmentPrediction::begin(const DeviceLoads& loads, const SegmentProgress& progress) {
  progress_ = &progress;
  free_ns_ = loads.free_ns;
  link_free_ns_ = progress.link_free_ns;
  link_free_ns_.resize(n_memories_ * n_memories_, 0);
}

void SegmentPrediction::add_event(const Event& event) {
  events_.push_back(event);
  std::push_heap(events_.begin(), events_.end());
}

// Counts what each segment waits for; those that wait for nothing are ready.
void SegmentPrediction::count_waits(const std::vector<std::int64_t>& devices) {
  waits_.resize(n_segments_);
  for (std::uint32_t at = 0; at < n_segments_; ++at) {
    if (has_begun(at)) {
      add_event({progress_->ends_ns[at], at, /*has_ended=*/true});
      continue;
    }
    const std::int64_t to = graph_.memory_of[index_of(devices[at])];
    waits_[at] = graph_.after[at].size();
    for (const std::uint32_t value : read_[at]) {
      const std::int64_t producer = graph_.values[value].producer;
      const std::int64_t from = producer == kCaller
                                    ? graph_.home
                                    : graph_.memory_of[index_of(devices[index_of(producer)])];
      waits_[at] += from != to;
    }
    if (waits_[at] == 0) add_event({0, at, /*has_ended=*/false});
  }
}

// Notes that one of the things has come for which a segment waits.
void SegmentPrediction::arrive(std::uint32_t segment, double ns) {
  if (has_begun(segment)) return;
  arrivals_ns_[segment] = std::max(arrivals_ns_[segment], ns);
  if (--waits_[segment] == 0) {
    add_event({arrivals_ns_[segment], segment, /*has_ended=*/false});
  }
}

// Notes that a value is in a memory, where segments and perhaps the caller read it.
void SegmentPrediction::tell_readers(const SharedValues& one, std::size_t to, double ns,
                                     const std::vector<std::int64_t>& devices) {
  if (one.is_returned && to == index_of(graph_.home)) returned_ns_ = std::max(returned_ns_, ns);
  for (const std::int64_t reader : one.readers) {
    if (index_of(graph_.memory_of[index_of(devices[index_of(reader)])]) == to) {
      arrive(static_cast<std::uint32_t>(reader), ns);
    }
  }
}

// Notes the copies of a producer's values: one to each memory in which any of them is read.
void SegmentPrediction::send(std::int64_t producer, double ended_ns,
                             const std::vector<std::int64_t>& devices) {
  const std::vector<std::uint32_t>& made = made_[index_of(producer + 1)];
  if (made.empty() || n_memories_ == 1) return;
  const auto memory_at = [&](std::int64_t segment) {
    return index_of(graph_.memory_of[index_of(devices[index_of(segment)])]);
  };
  const std::vector<double>& present_ns = progress_->present_ns;
  const std::size_t from = producer == kCaller ? index_of(graph_.home) : memory_at(producer);
  for (std::size_t to = 0; to < n_memories_; ++to) {
    if (to == from) continue;
    const auto is_present = [&](std::uint32_t value) {
      return !present_ns.empty() && present_ns[value * n_memories_ + to] != kNotThere;
    };
    double size_bytes = 0;
    bool is_sent = false;
    for (const std::uint32_t value : made) {
      const SharedValues& one = graph_.values[value];
      const bool is_read =
          !is_present(value) &&
          ((one.is_returned && to == index_of(graph_.home)) ||
           std::any_of(one.readers.begin(), one.readers.end(), [&](std::int64_t reader) {
             return memory_at(reader) == to && !has_begun(index_of(reader));
           }));
      if (is_read) size_bytes += one.size_bytes;
      is_sent = is_sent || is_read;
    }
    const std::size_t link = from * n_memories_ + to;
    double end_ns = 0;
    if (is_sent) {
      const double took_ns = copy_ns(from, to, size_bytes);
      end_ns = std::max(ended_ns, link_free_ns_[link]) + took_ns;
      link_free_ns_[link] = end_ns;
      link_busy_ns_[link] += took_ns;
    }
    for (const std::uint32_t value : made) {
      const double ns = is_present(value) ? present_ns[value * n_memories_ + to] : end_ns;
      if (is_sent || is_present(value)) tell_readers(graph_.values[value], to, ns, devices);
    }
  }
}

// When what a segment reads is in a device's memory, if it is chosen now. Where that is kept,
// copies are on their way, and later readers do not copy again.
double SegmentPrediction::arrival_at(std::size_t segment, std::size_t device, bool is_kept) {
  const std::size_t to = index_of(graph_.memory_of[device]);
  attempt_link_ns_ = link_free_ns_;
  double arrival_ns = 0;
  const std::vector<std::uint32_t>& read = read_[segment];  // by producer
  for (std::size_t first = 0, last = 0; first < read.size(); first = last) {
    const std::int64_t producer = graph_.values[read[first]].producer;
    double size_bytes = 0;
    bool is_missing = false;
    for (; last < read.size() && graph_.values[read[last]].producer == producer; ++last) {
      const double present_ns = present_ns_[read[last] * n_memories_ + to];
      arrival_ns = std::max(arrival_ns, present_ns);
      if (present_ns != kNotThere) continue;
      size_bytes += graph_.values[read[last]].size_bytes;
      is_missing = true;
    }
    if (!is_missing) continue;
    const std::size_t from = origin_of_[index_of(producer + 1)];
    const double made_ns = producer == kCaller ? 0 : ends_ns_[index_of(producer)];
    double& link_ns = attempt_link_ns_[from * n_memories_ + to];
    link_ns = std::max(link_ns, made_ns) + copy_ns(from, to, size_bytes);
    arrival_ns = std::max(arrival_ns, link_ns);
    for (std::size_t at = first; is_kept && at < last; ++at) {
      double& present_ns = present_ns_[read[at] * n_memories_ + to];
      if (present_ns == kNotThere) present_ns = link_ns;
    }
  }
  if (is_kept) std::swap(link_free_ns_, attempt_link_ns_);
  return arrival_ns;
}

// When a segment ends on a device, if earlier ones are where `devices` says.
double SegmentPrediction::end_at(std::size_t segment, std::size_t device,
                                 const std::vector<std::int64_t>& devices,
                                 const DeviceLoads& loads) {
  double begin_ns = std::max(free_ns_[device], arrival_at(segment, device, false));
  for (const std::int64_t before : graph_.after[segment]) {
    const bool is_other = index_of(devices[index_of(before)]) != device;
    begin_ns =
        std::max(begin_ns, ends_ns_[index_of(before)] + (is_other ? graph_.hand_over_ns : 0));
  }
  return begin_ns + graph_.costs_ns[segment * graph_.n_devices + device] * loads.paces[device];
}

// The time until the caller has what a segment makes for it on a device.
double SegmentPrediction::returning_ns(std::size_t segment, std::size_t device) const {
  const std::size_t memory = index_of(graph_.memory_of[device]);
  const std::size_t home = index_of(graph_.home);
  if (memory == home) return 0;
  double size_bytes = 0;
  bool is_returned = false;
  for (const std::uint32_t value : made_[segment + 1]) {
    if (!graph_.values[value].is_returned) continue;
    size_bytes += graph_.values[value].size_bytes;
    is_returned = true;
  }
  return is_returned ? copy_ns(memory, home, size_bytes) : 0;
}

std::vector<std::int64_t> SegmentPrediction::earliest(const DeviceLoads& loads,
                                                      const std::vector<std::int64_t>& begun,
                                                      const SegmentProgress& progress) {
  check_loads(loads);
  begin(loads, progress);
  const std::size_t home = index_of(graph_.home);
  ends_ns_.resize(n_segments_);
  present_ns_ = progress.present_ns;
  present_ns_.resize(graph_.values.size() * n_memories_, kNotThere);
  origin_of_.assign(n_segments_ + 1, home);
  for (const std::uint32_t value : made_[0]) present_ns_[value * n_memories_ + home] = 0;
  std::vector<std::int64_t> devices(n_segments_);
  for (std::size_t at = 0; at < n_segments_; ++at) {
    if (has_begun(at)) {
      devices[at] = begun[at];
      ends_ns_[at] = progress.ends_ns[at];
    } else {
      const auto [best, end_ns] = earliest_at(at, devices, loads);
      arrival_at(at, best, true);
      devices[at] = static_cast<std::int64_t>(best);
      ends_ns_[at] = free_ns_[best] = end_ns;
    }
    origin_of_[at + 1] = index_of(graph_.memory_of[index_of(devices[at])]);
    for (const std::uint32_t value : made_[at + 1]) {
      present_ns_[value * n_memories_ + origin_of_[at + 1]] = ends_ns_[at];
    }
  }
  return devices;
}

// The device with the earliest end of a segment, and that end.
std::pair<std::size_t, double> SegmentPrediction::earliest_at(
    std::size_t segment, const std::vector<std::int64_t>& devices, const DeviceLoads& loads) {
  std::size_t best = graph_.n_devices;
  double best_ns = 0;
  double end_ns = 0;
  for (std::size_t device = 0; device < graph_.n_devices; ++device) {
    if (!can_run(segment, device)) continue;
    const double found_ns = end_at(segment, device, devices, loads);
    const double done_ns = found_ns + returning_ns(segment, device);
    if (best < graph_.n_devices && !(done_ns < best_ns)) continue;
    best = device;
    best_ns = done_ns;
    end_ns = found_ns;
  }
  return {best, end_ns};
}

std::vector<std::vector<std::int64_t>> SegmentPrediction::alternatives(
    const DeviceLoads& loads, const std::vector<std::int64_t>& devices,
    const SegmentProgress& progress) {
  std::vector<std::vector<std::int64_t>> found{earliest(loads, devices, progress)};
  for (std::size_t device = 0; device < graph_.n_devices; ++device) {
    found.push_back(found.front());
    for (std::size_t at = 0; at < n_segments_; ++at) {
      if (!has_begun(at) && can_run(at, device))
        found.back()[at] = static_cast<std::int64_t>(device);
    }
  }
  return found;
}

}  // namespace offload
