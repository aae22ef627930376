// A graph of tasks, checked and laid out for planners. Private to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/task_placement.hpp"

namespace offload {

// Random numbers that are the same on every machine, unlike those of the standard's distributions.
//
// Source: SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
// OOPSLA 2014.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}

  std::uint64_t word() {
    std::uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }
  // From 0 up to but excluding `end`, which is positive and below 2^32.
  std::size_t below(std::size_t end) {
    return static_cast<std::size_t>(((word() >> 32) * static_cast<std::uint64_t>(end)) >> 32);
  }
  // From 0 up to but excluding 1.
  double fraction() { return static_cast<double>(word() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

// An edge as seen from one of its ends: the task at the other end, and the number of the edge.
struct TaskEnd {
  std::uint32_t task;
  std::uint32_t edge;
};

template <typename Element>
struct Row {
  const Element* first;
  const Element* last;
  const Element* begin() const { return first; }
  const Element* end() const { return last; }
  std::size_t size() const { return static_cast<std::size_t>(last - first); }
};

// Owner: the caller; the graph must outlive it. Thread: any, once it is made. Errors: PlanError if
// the lengths of arrays do not match, an edge names a task that does not exist, edges form a cycle,
// a number is negative or NaN, a busy processor takes fewer watts than an idle one, no processor
// can run a task, or the totals reach 2^62 ns or bytes.
class TaskProblem {
 public:
  explicit TaskProblem(const TaskGraph& graph);

  std::size_t n_tasks() const { return n_tasks_; }
  std::size_t n_processors() const { return n_processors_; }
  const TaskGraph& graph() const { return graph_; }

  bool can_run(std::size_t task, std::size_t processor) const { return cost(task, processor) >= 0; }
  std::int64_t cost(std::size_t task, std::size_t processor) const {
    return graph_.costs_ns[task * n_processors_ + processor];
  }
  std::int64_t memory(std::size_t task) const { return graph_.memory_bytes[task]; }
  // For a processor without a limit, more than all tasks take.
  std::int64_t memory_limit(std::size_t processor) const { return limits_[processor]; }

  Row<TaskEnd> producers(std::size_t task) const { return row(producers_, producers_at_, task); }
  Row<TaskEnd> consumers(std::size_t task) const { return row(consumers_, consumers_at_, task); }
  // The time to copy an edge's bytes from one processor to another; 0 on one processor.
  std::int64_t transfer(std::uint32_t edge, std::size_t from, std::size_t to) const {
    return transfers_[edge * n_link_classes_ + link_class_[from * n_processors_ + to]];
  }

  // Tasks, each after its producers; and the position of each task in that order.
  const std::vector<std::uint32_t>& topological() const { return topological_; }
  const std::vector<std::uint32_t>& rank_in_topological() const { return topological_at_; }

  // No schedule ends earlier than this after a task has begun on a processor.
  std::int64_t tail(std::size_t task, std::size_t processor) const {
    return tails_[task * n_processors_ + processor];
  }
  // Each task where its cost and the processor's load are low; memory is ignored.
  const std::vector<std::uint32_t>& balanced() const { return balanced_; }
  std::int64_t latency_bound() const { return latency_bound_; }
  std::int64_t period_bound() const { return period_bound_; }
  double energy_bound() const { return energy_bound_; }

 private:
  void check_sizes() const;
  void check_numbers() const;
  void lay_out_edges();
  void sort_topologically();
  void lay_out_transfers();
  void check_sums();
  void find_tails();
  void find_bounds();
  double load_bound();

  static Row<TaskEnd> row(const std::vector<TaskEnd>& ends, const std::vector<std::uint32_t>& at,
                          std::size_t task) {
    return {ends.data() + at[task], ends.data() + at[task + 1]};
  }

  const TaskGraph& graph_;
  std::size_t n_tasks_;
  std::size_t n_processors_;
  std::vector<TaskEnd> producers_, consumers_;
  std::vector<std::uint32_t> producers_at_, consumers_at_;
  std::size_t n_link_classes_ = 1;  // links with equal times; the first class takes no time
  std::vector<std::uint32_t> link_class_;
  std::vector<std::int64_t> transfers_;
  std::vector<std::uint32_t> topological_, topological_at_;
  std::vector<std::int64_t> limits_;
  std::vector<std::int64_t> tails_;
  std::vector<std::uint32_t> balanced_;
  std::int64_t latency_bound_ = 0;
  std::int64_t period_bound_ = 0;
  double energy_bound_ = 0;
};

// The processor of each task.
using Assignment = std::vector<std::uint32_t>;

// The order in which processors run tasks, and the processor of each. A task begins as soon as its
// processor has finished earlier tasks and what it reads has arrived.
struct OrderedTasks {
  std::vector<std::uint32_t> order;
  Assignment processors;
};

// The value of a placement for an objective.
double value_of(const TaskPlacement& placement, TaskObjective objective);

// The times of tasks in an order with each after its producers, and what follows from them.
TaskPlacement place_in_order(const TaskProblem& problem, const OrderedTasks& tasks);

// The load of the busiest processor or link for each input.
std::int64_t period_of(const TaskProblem& problem, const Assignment& processors);

// ---- the portfolio ------------------------------------------------------------------------------

struct Candidate {
  const char* method;
  OrderedTasks tasks;
};

// HEFT, PEFT and others, as far as they find memory; and all tasks on one processor.
std::vector<Candidate> portfolio(const TaskProblem& problem);

// Each task on its processor, in the order of upward ranks, in the first gap that fits.
OrderedTasks schedule_assigned(const TaskProblem& problem, const Assignment& processors);

// An assignment with sufficient memory. Errors: PlanError if none is found.
Assignment fit_in_memory(const TaskProblem& problem);

// ---- the searches -------------------------------------------------------------------------------

struct SearchLimits {
  std::int64_t max_evaluations;
  std::uint64_t seed;
  std::int64_t latency_ns = -1;  // for energy alone
};

struct Searched {
  OrderedTasks tasks;
  std::int64_t n_evaluations;
};

// Minimises the latency; or the energy within a latency.
Searched search_order(const TaskProblem& problem, const OrderedTasks& begin,
                      TaskObjective objective, const SearchLimits& limits);

struct SearchedAssignment {
  Assignment processors;
  std::int64_t n_evaluations;
};

// Each processor has consecutive tasks of the topological order, as evenly as possible. Empty if no
// such assignment was found that can run the tasks and has the memory.
Assignment pipeline_stages(const TaskProblem& problem);

// Minimises the load of the busiest processor or link.
SearchedAssignment search_assignment(const TaskProblem& problem,
                                     const std::vector<Assignment>& begins,
                                     const SearchLimits& limits);

}  // namespace offload
