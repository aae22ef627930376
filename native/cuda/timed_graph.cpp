#include "cuda/timed_graph.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "cuda/graph_order.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

constexpr double kNsInMs = 1e6;

std::uint64_t whole_ns(double ns) { return static_cast<std::uint64_t>(std::llround(ns)); }

// The union of intervals, as disjoint intervals in order.
std::vector<std::pair<double, double>> united(std::vector<std::pair<double, double>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<std::pair<double, double>> found;
  for (const auto& one : intervals) {
    if (found.empty() || one.first > found.back().second) {
      found.push_back(one);
    } else {
      found.back().second = std::max(found.back().second, one.second);
    }
  }
  return found;
}

}  // namespace

TimedGraph::TimedGraph(const Driver& driver, const TimedTemplate& from,
                       const CudaWeightStream& weights, Stream stream)
    : driver_(driver),
      weights_(weights),
      graph_(driver.graph_destroy),
      exec_(driver.graph_exec_destroy),
      applied_(from.nodes.size()) {
  driver_.check(driver_.graph_clone(graph_.fill(), from.graph), "cloning a graph to time");
  nodes_ = nodes_in_clone(driver_, graph_.get(), from.nodes);
  for (Event& arrival : arrivals_) arrival = new_event();
  lane_free_ = new_event();
  add_waits(from);
  add_copies(from);
  std::vector<GraphNode> ends;
  for (const std::uint32_t node : from.streamed.ready_after) ends.push_back(nodes_[node]);
  add_event(ends, outputs_ready_);
  check_count(from);
  driver_.check(driver_.graph_instantiate(exec_.fill(), graph_.get(), kUseNodePriority),
                "instantiating a graph to time");
  driver_.check(driver_.graph_upload(exec_.get(), stream), "uploading a graph to time");
}

// ---- the graph ----------------------------------------------------------------------------------

Event TimedGraph::new_event() {
  Held<Event>& event = events_.emplace_back(driver_.event_destroy);
  driver_.check(driver_.event_create(event.fill(), kEventWithTimes), "making an event");
  return event.get();
}

GraphNode TimedGraph::add_event(const std::vector<GraphNode>& after, Event& event) {
  event = new_event();
  GraphNode node = nullptr;
  driver_.check(
      driver_.graph_add_event_record_node(&node, graph_.get(), after.data(), after.size(), event),
      "adding an event to a graph to time");
  ++n_added_;
  return node;
}

void TimedGraph::depend(const std::vector<GraphNode>& from, const std::vector<GraphNode>& to) {
  if (from.empty()) return;
  const std::vector<EdgeData> data(from.size());
  driver_.check(driver_.graph_add_dependencies(graph_.get(), from.data(), to.data(), data.data(),
                                               from.size()),
                "ordering an event in a graph to time");
}

// Adds an event before each node that waits for copies, after all captured nodes that it waits for.
void TimedGraph::add_waits(const TimedTemplate& from) {
  std::map<std::uint32_t, std::vector<std::size_t>> copies_of;
  for (std::size_t copy = 0; copy < from.streamed.copies.size(); ++copy) {
    for (const std::uint32_t node : from.streamed.copies[copy].before) {
      copies_of[node].push_back(copy);
    }
  }
  std::int64_t first_launch = -1;
  std::map<GraphNode, std::size_t> position_of;
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    position_of[nodes_[node]] = node;
    const std::int64_t launch = from.launches[node];
    if (launch >= 0 && (first_launch < 0 || launch < first_launch)) first_launch = launch;
  }
  first_launch_ = static_cast<std::size_t>(std::max<std::int64_t>(first_launch, 0));
  std::map<std::size_t, std::vector<GraphNode>> captured_before;
  for (const auto& [before, after] : edges_of(driver_, graph_.get())) {
    const auto reader = position_of.find(after);
    if (reader != position_of.end() && position_of.count(before) != 0) {
      captured_before[reader->second].push_back(before);
    }
  }
  for (const auto& [node, copies] : copies_of) {
    const std::int64_t launch = from.launches[node];
    if (launch < 0) continue;  // no plan has a copy for it
    WaitingNode waiting{static_cast<std::size_t>(launch), nullptr, copies};
    depend({add_event(captured_before[node], waiting.ready)}, {nodes_[node]});
    waiting_.push_back(std::move(waiting));
  }
}

// Adds the chain of copies, each with an event before and after it, between its neighbours.
void TimedGraph::add_copies(const TimedTemplate& from) {
  std::vector<GraphNode> first, last;
  for (const auto& [begin, end] : from.copies.ends()) {
    first.push_back(begin);
    last.push_back(end);
  }
  first = nodes_in_clone(driver_, graph_.get(), first);
  last = nodes_in_clone(driver_, graph_.get(), last);
  GraphNode before = nullptr;
  for (std::size_t index = 0; index < from.streamed.copies.size(); ++index) {
    const StreamedCopy& place = from.streamed.copies[index];
    TimedCopy copy{place.transfer, place.for_next_pass, nullptr, nullptr};
    std::vector<GraphNode> after;
    for (const std::uint32_t node : place.after) after.push_back(nodes_[node]);
    if (before != nullptr) after.push_back(before);
    depend({add_event(after, copy.begin)}, {first[index]});
    before = add_event({last[index]}, copy.end);
    std::vector<GraphNode> readers;
    for (const std::uint32_t node : place.before) readers.push_back(nodes_[node]);
    depend(std::vector<GraphNode>(readers.size(), before), readers);
    if (copy.for_next_pass) {
      prologue_.push_back({place.transfer, true, new_event(), new_event()});
    }
    copies_.push_back(copy);
  }
}

void TimedGraph::check_count(const TimedTemplate& from) const {
  std::size_t n_before = 0, n_nodes = 0;
  driver_.check(driver_.graph_get_nodes(from.graph, nullptr, &n_before), "counting nodes");
  driver_.check(driver_.graph_get_nodes(graph_.get(), nullptr, &n_nodes), "counting nodes");
  if (n_nodes == n_before + n_added_) return;
  throw ExecutionError("the graph to time has " + std::to_string(n_nodes) + " nodes, expected " +
                       std::to_string(n_before) + " and " + std::to_string(n_added_) + " events");
}

Result TimedGraph::set(std::size_t node, ResidentNode& parameters, Context context) {
  applied_[node].clear();
  const Result result = parameters.set_exec(exec_.get(), nodes_[node], context);
  if (result == kSuccess) note_applied(node, parameters);
  return result;
}

// ---- one pass -----------------------------------------------------------------------------------

// Records the lane's event first: where the lane is idle it lies before the arrival, so nothing
// waited. Records the arrival before the host waits for anything, which would delay the stream.
void TimedGraph::before_pass(StreamAddress stream) {
  n_in_prologue_ = 0;
  early_ns_.reset();
  driver_.check(driver_.event_record(lane_free_, weights_.lane()), "timing the last copies");
  driver_.check(driver_.event_record(arrivals_[1 - turn_], static_cast<Stream>(stream)),
                "timing an execution's begin");
  if (std::exchange(last_copies_run_, false)) finish_last_copies();
  turn_ = 1 - turn_;
}

void TimedGraph::before_copy(std::size_t transfer) {
  TimedCopy& copy = prologue_.at(n_in_prologue_);
  copy.transfer = transfer;
  driver_.check(driver_.event_record(copy.begin, weights_.lane()), "timing the copy of a weight");
}

void TimedGraph::behind_copy(std::size_t) {
  driver_.check(driver_.event_record(prologue_.at(n_in_prologue_).end, weights_.lane()),
                "timing the copy of a weight");
  ++n_in_prologue_;
}

// The time since the arrival of the latest pass; no value while the event is pending.
std::optional<double> TimedGraph::moment_ns(Event event) const {
  float milliseconds = 0;
  const Result result = driver_.event_elapsed_time(&milliseconds, arrivals_[turn_], event);
  if (result == kNotReady) return std::nullopt;
  driver_.check(result, "timing an execution");
  return static_cast<double>(milliseconds) * kNsInMs;
}

double TimedGraph::ended_ns(Event event) const {
  const std::optional<double> found = moment_ns(event);
  if (!found) throw ExecutionError("an event of an execution that has ended was not recorded");
  return *found;
}

std::uint64_t TimedGraph::host_ns(double moment_ns) const {
  return static_cast<std::uint64_t>(
      std::max<std::int64_t>(0, arrival_ns_ + static_cast<std::int64_t>(std::llround(moment_ns))));
}

TransferTime TimedGraph::transfer_time(const TimedCopy& copy, double begin_ns,
                                       double end_ns) const {
  const std::size_t weight = weights_.plan().transfers[copy.transfer].weight;
  return {weights_.plan().weights[weight].name, host_ns(begin_ns), host_ns(end_ns),
          weights_.copies()[copy.transfer].size_bytes};
}

// Durations of the last copies of the pass before, which were not waited for.
void TimedGraph::finish_last_copies() {
  driver_.check(driver_.event_synchronize(lane_free_), "waiting for the last copies");
  double busy_ns = 0;
  late_.clear();
  for (const TimedCopy& copy : copies_) {
    if (!copy.for_next_pass) continue;
    const double begin_ns = ended_ns(copy.begin), end_ns = ended_ns(copy.end);
    busy_ns += end_ns - begin_ns;
    late_.push_back(transfer_time(copy, begin_ns, end_ns));
  }
  early_ns_ = busy_ns;
}

void TimedGraph::report(PassReport& report) {
  driver_.check(driver_.event_synchronize(outputs_ready_), "waiting for the outputs");
  const std::uint64_t seen_ns = now_ns();
  const double ready_ns = ended_ns(outputs_ready_);
  report.transfers = std::exchange(late_, {});
  arrival_ns_ = static_cast<std::int64_t>(seen_ns) - std::llround(ready_ns);
  report_copies(report);
  report_waits(report);
  report.device_ns = whole_ns(ready_ns);
  report.is_timed = true;
}

// The bytes with which a pass begins were copied by its own prologue, by a timed pass, or by a
// pass without timing.
void TimedGraph::report_copies(PassReport& report) {
  double busy_ns = early_ns_.value_or(0.0);
  const bool knows_early = early_ns_.has_value() || n_in_prologue_ > 0;
  if (n_in_prologue_ > 0) busy_ns = 0;
  for (std::size_t index = 0; index < n_in_prologue_; ++index) {
    const double begin_ns = ended_ns(prologue_[index].begin);
    const double end_ns = ended_ns(prologue_[index].end);
    busy_ns += end_ns - begin_ns;
    report.transfers.push_back(transfer_time(prologue_[index], begin_ns, end_ns));
  }
  for (const TimedCopy& copy : copies_) {
    const std::uint64_t size_bytes = weights_.copies()[copy.transfer].size_bytes;
    const std::optional<double> begin_ns = moment_ns(copy.begin), end_ns = moment_ns(copy.end);
    if (begin_ns) {
      const double until_ns = end_ns.value_or(ended_ns(outputs_ready_));
      report.transfers.push_back(transfer_time(copy, *begin_ns, std::max(*begin_ns, until_ns)));
    }
    if (copy.for_next_pass) {
      if (!knows_early) report.untimed_bytes += size_bytes;
      last_copies_run_ = true;
    } else if (begin_ns && end_ns) {
      busy_ns += *end_ns - *begin_ns;
    } else {
      report.untimed_bytes += size_bytes;  // not read, so not waited for
    }
  }
  report.busy_ns = whole_ns(busy_ns);
}

void TimedGraph::report_waits(PassReport& report) const {
  std::map<std::size_t, std::vector<Interval>> waits;
  const Event last = n_in_prologue_ > 0 ? prologue_[n_in_prologue_ - 1].end : lane_free_;
  if (const double free_ns = ended_ns(last); free_ns > 0) {
    waits[first_launch_].emplace_back(0.0, free_ns);
  }
  for (const WaitingNode& node : waiting_) {
    const double ready_ns = ended_ns(node.ready);
    double arrived_ns = ready_ns;
    for (const std::size_t copy : node.copies) {
      arrived_ns = std::max(arrived_ns, ended_ns(copies_[copy].end));
    }
    if (arrived_ns > ready_ns) waits[node.launch].emplace_back(ready_ns, arrived_ns);
  }
  std::vector<Interval> all;
  for (const auto& [launch, intervals] : waits) {
    for (const Interval& one : united(intervals)) {
      report.waits.push_back({launch, host_ns(one.first), host_ns(one.second)});
      all.push_back(one);
    }
  }
  double wait_ns = 0;
  for (const Interval& one : united(all)) wait_ns += one.second - one.first;
  report.wait_ns = whole_ns(wait_ns);
}

}  // namespace offload::cuda
