// Placement of a graph of tasks on unrelated processors: where and when each task runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace offload {

// The cost of a task on a processor that cannot run it, and the value for no limit.
inline constexpr std::int64_t kCannotRun = -1;
inline constexpr std::int64_t kNoLimit = -1;

// What the consumer reads of the producer's result. On one processor it costs nothing; otherwise it
// takes overhead + bytes / bandwidth of the link, rounded up to ns.
struct TaskEdge {
  std::int64_t producer;
  std::int64_t consumer;
  std::int64_t size_bytes;
};

struct ProcessorLink {
  double overhead_ns;
  double bytes_per_second;
};

// Tasks and processors are numbered. A processor runs one task at a time. Transfers overlap with
// tasks and with each other, as in the model of H. Topcuoglu, S. Hariri and M.-Y. Wu,
// "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous Computing", IEEE TPDS
// 13(3), 2002. A task's memory is held on its processor throughout.
struct TaskGraph {
  std::size_t n_processors = 0;
  std::vector<std::int64_t> costs_ns;      // task * n_processors + processor; or kCannotRun
  std::vector<std::int64_t> memory_bytes;  // by task
  std::vector<TaskEdge> edges;
  std::vector<ProcessorLink> links;               // from * n_processors + to; empty without edges
  std::vector<std::int64_t> memory_limits_bytes;  // by processor; or kNoLimit
  std::vector<double> busy_watts;                 // by processor, while it runs a task
  std::vector<double> idle_watts;                 // by processor, while it runs none
};

enum class TaskObjective : std::int64_t {
  kLatency,     // from the beginning of the first task to the end of the last
  kThroughput,  // for a stream of inputs: the load of the busiest processor or link for each
  kEnergy,      // of one input, within a slowdown
};

// Default limits of a search: evaluations, and tasks placed in total (those of a small graph in
// 20,000 evaluations).
inline constexpr std::int64_t kDefaultEvaluations = 20'000;
inline constexpr std::int64_t kDefaultPlacedTasks = 10'000'000;

struct TaskPlacementOptions {
  TaskObjective objective = TaskObjective::kLatency;
  // kEnergy: how far the latency may exceed the least one found, as a factor of at least 1.
  double max_slowdown = 1;
  // Placements that the search may try in addition to the portfolio. Counted, not timed, so the
  // same input always gives the same placement. 0 turns it off.
  std::int64_t max_evaluations = kDefaultEvaluations;
  std::uint64_t seed = 0;
};

// A placement. Times are those of one input that runs alone.
struct TaskPlacement {
  std::vector<std::int64_t> processors;  // by task
  std::vector<std::int64_t> begin_ns;
  std::vector<std::int64_t> end_ns;
  std::int64_t latency_ns = 0;
  std::int64_t period_ns = 0;  // for each input of a stream
  double energy_nj = 0;        // of one input, including idle processors
};

struct FoundPlacement {
  TaskPlacement placement;
  std::string method;              // what found it: one of the candidates, or "search"
  std::int64_t n_evaluations = 0;  // of the search
  // Lower bounds over all placements: of the latency or period, and of the energy.
  std::int64_t lower_bound_ns = 0;
  double lower_bound_nj = 0;
  std::int64_t latency_limit_ns = 0;  // for kEnergy
  // The portfolio's results, by method: the latency, period or energy.
  std::vector<std::pair<std::string, double>> candidates;
};

// Places every task on a processor that can run it and has the memory for it.
//
// Latency: HEFT, its order with PEFT's table, PEFT, CPOP and all tasks on one processor; then
// simulated annealing over order and processors. Never worse than the best of the portfolio.
// Throughput: the processors of these, and consecutive stages along the graph; then annealing over
// processors. Energy: the cheapest within the slowdown, starting from the placement of least
// latency and from that of least energy.
//
// Thread: any; nothing is shared. Errors: PlanError if the lengths of arrays do not match, a number
// is negative or NaN, an edge names a task that does not exist, edges form a cycle, the totals
// reach 2^62 ns or bytes, no processor can run a task, or an option is out of range; and if the
// memory does not suffice (the message says whether that is proved).
FoundPlacement place_tasks(const TaskGraph& graph, const TaskPlacementOptions& options);

// The objective if only the tasks of a group ran on another processor, the others as and in the
// order they are: by group and processor (group * n_processors + processor); -1 where they cannot
// run, the memory does not suffice or the latency exceeds its limit. `order` is the order in which
// the processors run the tasks.
//
// Thread: any. Errors: as place_tasks; PlanError if the order or a processor is invalid.
std::vector<double> moved_costs(const TaskGraph& graph, TaskObjective objective,
                                const std::vector<std::int64_t>& processors,
                                const std::vector<std::int64_t>& order,
                                const std::vector<std::vector<std::int64_t>>& groups,
                                std::int64_t latency_limit_ns = kNoLimit);

}  // namespace offload
