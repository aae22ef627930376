#include "task_problem.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 62;
constexpr std::size_t kMostTasks = std::size_t{1} << 24;
constexpr std::size_t kMostProcessors = 1'024;

// Rounds that tighten the bound of loads, fewer for many tasks.
constexpr std::size_t kMostRounds = 200;
constexpr std::size_t kLeastRounds = 60;
constexpr std::size_t kRoundVisits = 200'000;

// The relative rounding error by which a floating-point sum of this many numbers may be too high.
double rounding(std::size_t n_numbers) { return static_cast<double>(n_numbers + 16) * 0x1p-52; }

[[noreturn]] void refuse(const std::string& why) { throw PlanError(why); }

std::string edge_name(const TaskEdge& edge) {
  return "edge " + std::to_string(edge.producer) + " to " + std::to_string(edge.consumer);
}

// Adds non-negative numbers, up to kMost.
std::int64_t add(std::int64_t one, std::int64_t other) {
  return std::min(kMost, std::min(kMost, one) + std::min(kMost, other));
}

std::int64_t transfer_ns(std::int64_t size_bytes, const ProcessorLink& link) {
  const double ns =
      std::ceil(link.overhead_ns + static_cast<double>(size_bytes) * 1e9 / link.bytes_per_second);
  return ns < static_cast<double>(kMost) ? static_cast<std::int64_t>(ns) : kMost;
}

}  // namespace

TaskProblem::TaskProblem(const TaskGraph& graph)
    : graph_(graph), n_tasks_(graph.memory_bytes.size()), n_processors_(graph.n_processors) {
  check_sizes();
  check_numbers();
  lay_out_edges();
  sort_topologically();
  lay_out_transfers();
  check_sums();
  find_tails();
  find_bounds();
}

void TaskProblem::check_sizes() const {
  const std::size_t n = n_tasks_;
  const std::size_t p = n_processors_;
  if (n > kMostTasks || p > kMostProcessors) {
    refuse("expected at most " + std::to_string(kMostTasks) + " tasks and " +
           std::to_string(kMostProcessors) + " processors, got " + std::to_string(n) + " and " +
           std::to_string(p));
  }
  if (n > 0 && p == 0) refuse("there are tasks and no processor");
  const bool has_links =
      graph_.links.size() == p * p || (graph_.edges.empty() && graph_.links.empty());
  if (graph_.costs_ns.size() != n * p || graph_.memory_limits_bytes.size() != p ||
      graph_.busy_watts.size() != p || graph_.idle_watts.size() != p || !has_links) {
    refuse(
        "expected a cost for each task and processor, a link for each two processors, and limits "
        "and watts for each processor");
  }
}

void TaskProblem::check_numbers() const {
  for (std::size_t task = 0; task < n_tasks_; ++task) {
    bool can_run_somewhere = false;
    for (std::size_t processor = 0; processor < n_processors_; ++processor) {
      const std::int64_t ns = cost(task, processor);
      if (ns < kCannotRun) {
        refuse("task " + std::to_string(task) + " has a negative cost on processor " +
               std::to_string(processor) + ": " + std::to_string(ns) + " ns");
      }
      can_run_somewhere = can_run_somewhere || ns != kCannotRun;
    }
    if (!can_run_somewhere) refuse("no processor can run task " + std::to_string(task));
    if (memory(task) < 0) {
      refuse("task " + std::to_string(task) +
             " takes a negative amount of memory: " + std::to_string(memory(task)) + " bytes");
    }
  }
  const auto n_tasks = static_cast<std::int64_t>(n_tasks_);
  for (const TaskEdge& edge : graph_.edges) {
    for (const std::int64_t task : {edge.producer, edge.consumer}) {
      if (task < 0 || task >= n_tasks) {
        refuse(edge_name(edge) + ": there are " + std::to_string(n_tasks) + " tasks");
      }
    }
    if (edge.size_bytes < 0) refuse(edge_name(edge) + " has a negative size");
  }
  for (std::size_t processor = 0; processor < n_processors_; ++processor) {
    const double busy = graph_.busy_watts[processor];
    const double idle = graph_.idle_watts[processor];
    if (!(idle >= 0 && busy >= idle && std::isfinite(busy))) {
      refuse("processor " + std::to_string(processor) +
             ": expected finite watts, 0 or more, and no fewer where it is busy than where it is "
             "idle");
    }
    if (graph_.memory_limits_bytes[processor] < kNoLimit) {
      refuse("processor " + std::to_string(processor) + " has a negative limit of memory");
    }
  }
  for (std::size_t at = 0; at < graph_.links.size(); ++at) {
    const ProcessorLink& link = graph_.links[at];
    if (at % (n_processors_ + 1) == 0) continue;  // of a processor to itself
    if (!(link.overhead_ns >= 0 && std::isfinite(link.overhead_ns) && link.bytes_per_second > 0)) {
      refuse("the link from processor " + std::to_string(at / n_processors_) + " to " +
             std::to_string(at % n_processors_) +
             ": expected an overhead of 0 ns or more and a bandwidth above 0");
    }
  }
}

void TaskProblem::lay_out_edges() {
  producers_at_.assign(n_tasks_ + 1, 0);
  consumers_at_.assign(n_tasks_ + 1, 0);
  for (const TaskEdge& edge : graph_.edges) {
    ++producers_at_[static_cast<std::size_t>(edge.consumer) + 1];
    ++consumers_at_[static_cast<std::size_t>(edge.producer) + 1];
  }
  std::partial_sum(producers_at_.begin(), producers_at_.end(), producers_at_.begin());
  std::partial_sum(consumers_at_.begin(), consumers_at_.end(), consumers_at_.begin());
  producers_.resize(graph_.edges.size());
  consumers_.resize(graph_.edges.size());
  std::vector<std::uint32_t> next_producer(producers_at_), next_consumer(consumers_at_);
  for (std::uint32_t index = 0; index < graph_.edges.size(); ++index) {
    const auto producer = static_cast<std::uint32_t>(graph_.edges[index].producer);
    const auto consumer = static_cast<std::uint32_t>(graph_.edges[index].consumer);
    producers_[next_producer[consumer]++] = {producer, index};
    consumers_[next_consumer[producer]++] = {consumer, index};
  }
}

void TaskProblem::sort_topologically() {
  std::vector<std::size_t> n_before(n_tasks_);
  for (std::uint32_t task = 0; task < n_tasks_; ++task) {
    n_before[task] = producers(task).size();
    if (n_before[task] == 0) topological_.push_back(task);
  }
  for (std::size_t at = 0; at < topological_.size(); ++at) {  // grows during the loop
    for (const TaskEnd& end : consumers(topological_[at])) {
      if (--n_before[end.task] == 0) topological_.push_back(end.task);
    }
  }
  if (topological_.size() != n_tasks_) {
    const auto left =
        std::find_if(n_before.begin(), n_before.end(), [](std::size_t count) { return count > 0; });
    refuse("the edges form a cycle, which task " + std::to_string(left - n_before.begin()) +
           " is on or behind");
  }
  topological_at_.resize(n_tasks_);
  for (std::uint32_t at = 0; at < n_tasks_; ++at) topological_at_[topological_[at]] = at;
}

void TaskProblem::lay_out_transfers() {
  link_class_.assign(n_processors_ * n_processors_, 0);
  std::map<std::pair<double, double>, std::uint32_t> classes;
  std::vector<ProcessorLink> links{{0, 1}};
  for (std::size_t at = 0; at < graph_.links.size(); ++at) {
    if (at % (n_processors_ + 1) == 0) continue;
    const ProcessorLink& link = graph_.links[at];
    const auto [found, is_new] = classes.try_emplace({link.overhead_ns, link.bytes_per_second},
                                                     static_cast<std::uint32_t>(links.size()));
    if (is_new) links.push_back(link);
    link_class_[at] = found->second;
  }
  n_link_classes_ = links.size();
  transfers_.assign(graph_.edges.size() * n_link_classes_, 0);
  for (std::size_t edge = 0; edge < graph_.edges.size(); ++edge) {
    for (std::size_t link = 1; link < n_link_classes_; ++link) {
      transfers_[edge * n_link_classes_ + link] =
          transfer_ns(graph_.edges[edge].size_bytes, links[link]);
    }
  }
}

void TaskProblem::check_sums() {
  std::int64_t total_ns = 0;
  std::int64_t total_bytes = 0;
  for (std::size_t task = 0; task < n_tasks_; ++task) {
    std::int64_t most_ns = 0;
    for (std::size_t p = 0; p < n_processors_; ++p) most_ns = std::max(most_ns, cost(task, p));
    total_ns = add(total_ns, most_ns);
    total_bytes = add(total_bytes, memory(task));
  }
  for (std::size_t edge = 0; edge < graph_.edges.size(); ++edge) {
    const auto first = transfers_.begin() + static_cast<std::ptrdiff_t>(edge * n_link_classes_);
    total_ns = add(total_ns,
                   *std::max_element(first, first + static_cast<std::ptrdiff_t>(n_link_classes_)));
  }
  if (total_ns >= kMost) refuse("costs and transfers add up to 2^62 ns or more");
  if (total_bytes >= kMost) refuse("tasks take 2^62 bytes or more");
  for (const std::int64_t limit : graph_.memory_limits_bytes) {
    limits_.push_back(limit == kNoLimit ? kMost : std::min(limit, kMost));
  }
}

void TaskProblem::find_tails() {
  tails_.assign(n_tasks_ * n_processors_, 0);
  for (auto task = topological_.rbegin(); task != topological_.rend(); ++task) {
    for (std::size_t p = 0; p < n_processors_; ++p) {
      if (!can_run(*task, p)) continue;
      std::int64_t behind = 0;
      for (const TaskEnd& end : consumers(*task)) {
        std::int64_t least = kMost;
        for (std::size_t q = 0; q < n_processors_; ++q) {
          if (can_run(end.task, q)) {
            least = std::min(least, transfer(end.edge, p, q) + tail(end.task, q));
          }
        }
        behind = std::max(behind, least);
      }
      tails_[*task * n_processors_ + p] = cost(*task, p) + behind;
    }
  }
}

// A lower bound, that of the linear program for divisible tasks: for weights of processors that sum
// to one, each task takes at least its least weighted cost. The weights of overloaded processors
// grow (S. Arora, E. Hazan and S. Kale, "The Multiplicative Weights Update Method", Theory of
// Computing 8, 2012).
double TaskProblem::load_bound() {
  std::vector<double> weights(n_processors_, 1.0 / static_cast<double>(n_processors_));
  const std::size_t n_rounds = std::clamp(
      kRoundVisits / std::max<std::size_t>(1, n_tasks_ * n_processors_), kLeastRounds, kMostRounds);
  double best = 0;
  std::vector<double> loads(n_processors_);
  std::vector<std::uint32_t> chosen_by_task(n_tasks_);
  double least_load = -1;
  for (std::size_t round = 0; round < n_rounds; ++round) {
    std::fill(loads.begin(), loads.end(), 0.0);
    double bound = 0;
    for (std::size_t task = 0; task < n_tasks_; ++task) {
      std::size_t chosen = n_processors_;
      double least = 0;
      for (std::size_t p = 0; p < n_processors_; ++p) {
        const double weighted = weights[p] * static_cast<double>(cost(task, p));
        if (can_run(task, p) && (chosen == n_processors_ || weighted < least)) {
          chosen = p;
          least = weighted;
        }
      }
      loads[chosen] += static_cast<double>(cost(task, chosen));
      bound += least;
      chosen_by_task[task] = static_cast<std::uint32_t>(chosen);
    }
    best = std::max(best, bound);
    const double most = *std::max_element(loads.begin(), loads.end());
    if (least_load < 0 || most < least_load) {
      least_load = most;
      balanced_ = chosen_by_task;
    }
    if (most <= 0) break;
    const double rate = 0.5 / (1.0 + 0.1 * static_cast<double>(round));
    double sum = 0;
    for (std::size_t p = 0; p < n_processors_; ++p) {
      sum += weights[p] *= std::exp(rate * (loads[p] / most - 1.0));
    }
    for (double& weight : weights) weight /= sum;
  }
  return best;
}

void TaskProblem::find_bounds() {
  if (n_tasks_ == 0) return;
  std::vector<std::int64_t> heads(n_tasks_ * n_processors_);
  double extra_nj = 0;
  std::int64_t longest_ns = 0;
  for (const std::uint32_t task : topological_) {
    std::int64_t through = kMost, least = kMost;
    double least_nj = -1;
    for (std::size_t p = 0; p < n_processors_; ++p) {
      if (!can_run(task, p)) continue;
      std::int64_t& head = heads[task * n_processors_ + p];
      for (const TaskEnd& end : producers(task)) {
        std::int64_t arrival = kMost;
        for (std::size_t q = 0; q < n_processors_; ++q) {
          if (!can_run(end.task, q)) continue;
          arrival = std::min(arrival, heads[end.task * n_processors_ + q] + cost(end.task, q) +
                                          transfer(end.edge, q, p));
        }
        head = std::max(head, arrival);
      }
      through = std::min(through, head + tail(task, p));
      least = std::min(least, cost(task, p));
      const double nj =
          static_cast<double>(cost(task, p)) * (graph_.busy_watts[p] - graph_.idle_watts[p]);
      if (least_nj < 0 || nj < least_nj) least_nj = nj;
    }
    latency_bound_ = std::max(latency_bound_, through);
    longest_ns = std::max(longest_ns, least);
    extra_nj += least_nj;
  }
  const auto load = static_cast<std::int64_t>(std::ceil(load_bound() * (1 - rounding(n_tasks_))));
  period_bound_ = std::max(longest_ns, load);
  latency_bound_ = std::max(latency_bound_, period_bound_);
  const double idle_watts =
      std::accumulate(graph_.idle_watts.begin(), graph_.idle_watts.end(), 0.0);
  energy_bound_ =
      (extra_nj + idle_watts * static_cast<double>(latency_bound_)) * (1 - rounding(n_tasks_));
}

double value_of(const TaskPlacement& placement, TaskObjective objective) {
  switch (objective) {
    case TaskObjective::kLatency:
      return static_cast<double>(placement.latency_ns);
    case TaskObjective::kThroughput:
      return static_cast<double>(placement.period_ns);
    case TaskObjective::kEnergy:
      return placement.energy_nj;
  }
  throw PlanError("there is no such objective");
}

std::int64_t period_of(const TaskProblem& problem, const Assignment& processors) {
  const std::size_t n_processors = problem.n_processors();
  std::vector<std::int64_t> loads(n_processors), links(n_processors * n_processors);
  for (std::uint32_t task = 0; task < problem.n_tasks(); ++task) {
    const std::size_t from = processors[task];
    loads[from] += problem.cost(task, from);
    for (const TaskEnd& end : problem.consumers(task)) {
      const std::size_t to = processors[end.task];
      links[from * n_processors + to] += problem.transfer(end.edge, from, to);
    }
  }
  std::int64_t most = 0;
  for (const std::int64_t load : loads) most = std::max(most, load);
  for (const std::int64_t load : links) most = std::max(most, load);
  return most;
}

TaskPlacement place_in_order(const TaskProblem& problem, const OrderedTasks& tasks) {
  const std::size_t n_processors = problem.n_processors();
  TaskPlacement placement;
  placement.processors.assign(tasks.processors.begin(), tasks.processors.end());
  placement.begin_ns.resize(problem.n_tasks());
  placement.end_ns.resize(problem.n_tasks());
  std::vector<std::int64_t> free_ns(n_processors), busy_ns(n_processors);
  for (const std::uint32_t task : tasks.order) {
    const std::size_t processor = tasks.processors[task];
    std::int64_t begin_ns = free_ns[processor];
    for (const TaskEnd& end : problem.producers(task)) {
      begin_ns =
          std::max(begin_ns, placement.end_ns[end.task] +
                                 problem.transfer(end.edge, tasks.processors[end.task], processor));
    }
    placement.begin_ns[task] = begin_ns;
    placement.end_ns[task] = free_ns[processor] = begin_ns + problem.cost(task, processor);
    busy_ns[processor] += problem.cost(task, processor);
    placement.latency_ns = std::max(placement.latency_ns, placement.end_ns[task]);
  }
  placement.period_ns = period_of(problem, tasks.processors);
  for (std::size_t processor = 0; processor < n_processors; ++processor) {
    const TaskGraph& graph = problem.graph();
    const std::int64_t idle_ns = placement.latency_ns - busy_ns[processor];
    placement.energy_nj += static_cast<double>(busy_ns[processor]) * graph.busy_watts[processor] +
                           static_cast<double>(idle_ns) * graph.idle_watts[processor];
  }
  return placement;
}

}  // namespace offload
