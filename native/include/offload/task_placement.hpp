// Placement of a graph of tasks on unrelated processors: which task runs where, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace offload {

// The cost of a task on a processor that cannot run it, and the limit of one that has none.
inline constexpr std::int64_t kCannotRun = -1;
inline constexpr std::int64_t kNoLimit = -1;

// What the consumer reads of what the producer makes. Where both run on one processor it is there
// already; otherwise it takes overhead + bytes / bandwidth of the link, rounded up to ns.
struct TaskEdge {
  std::int64_t producer;
  std::int64_t consumer;
  std::int64_t size_bytes;
};

struct ProcessorLink {
  double overhead_ns;
  double bytes_per_second;
};

// Tasks are numbered, and so are processors. A processor runs one task at a time. Transfers run
// beside tasks and beside one another: the model of H. Topcuoglu, S. Hariri and M.-Y. Wu,
// "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous Computing", IEEE
// TPDS 13(3), 2002. The memory of a task is taken on its processor throughout.
struct TaskGraph {
  std::size_t n_processors = 0;
  std::vector<std::int64_t> costs_ns;      // task * n_processors + processor; or kCannotRun
  std::vector<std::int64_t> memory_bytes;  // by task
  std::vector<TaskEdge> edges;
  std::vector<ProcessorLink> links;               // from * n_processors + to; none without edges
  std::vector<std::int64_t> memory_limits_bytes;  // by processor; or kNoLimit
  std::vector<double> busy_watts;                 // by processor, while it runs a task
  std::vector<double> idle_watts;                 // and while it does not
};

enum class TaskObjective : std::int64_t {
  kLatency,     // from the begin of the first task to the end of the last
  kThroughput,  // of a stream of inputs: what the busiest processor or link has to do for each
  kEnergy,      // of one input, within a slowdown
};

// What a search affords by default, in tasks that are put in place: those of a small graph in
// 20,000 evaluations.
inline constexpr std::int64_t kDefaultEvaluations = 20'000;
inline constexpr std::int64_t kDefaultPlacedTasks = 10'000'000;

struct TaskPlacementOptions {
  TaskObjective objective = TaskObjective::kLatency;
  // Of kEnergy: by how much the latency may exceed the least one found. 1 or more.
  double max_slowdown = 1;
  // Placements that the search may try beside those of the portfolio. Counted, not timed, so the
  // same input always gives the same placement. 0 turns it off.
  std::int64_t max_evaluations = kDefaultEvaluations;
  std::uint64_t seed = 0;
};

// One placement. Times are of one input that runs alone.
struct TaskPlacement {
  std::vector<std::int64_t> processors;  // by task
  std::vector<std::int64_t> begin_ns;
  std::vector<std::int64_t> end_ns;
  std::int64_t latency_ns = 0;
  std::int64_t period_ns = 0;  // per input of a stream of them
  double energy_nj = 0;        // of one input, idle processors included
};

struct FoundPlacement {
  TaskPlacement placement;
  std::string method;              // what found it: one of the candidates, or "search"
  std::int64_t n_evaluations = 0;  // of the search
  // No placement has less than this: of the latency or period, and of the energy.
  std::int64_t lower_bound_ns = 0;
  double lower_bound_nj = 0;
  std::int64_t latency_limit_ns = 0;  // of kEnergy
  // What the portfolio found, by method: the latency, period or energy.
  std::vector<std::pair<std::string, double>> candidates;
};

// Places every task on a processor that can run it and has the memory for it.
//
// For latency: HEFT, its order with PEFT's table, PEFT, CPOP and all on one processor; then
// simulated annealing over order and processor. Never worse than the best of the portfolio. For
// throughput: the processors of these, and each stage behind the other along the graph; then
// annealing over processors. For energy: the cheapest within the slowdown, from the placement of
// least latency and from that of least energy.
//
// Thread: any; nothing is shared. Errors: PlanError if numbers of things do not fit, a number is
// negative or none, an edge names a task that there is not, edges form a cycle, all together takes
// 2^62 ns or bytes or more, no processor can run a task, or an option is out of range; and if the
// memory does not suffice (the message says whether that is proved).
FoundPlacement place_tasks(const TaskGraph& graph, const TaskPlacementOptions& options);

// What the objective would be if only the tasks of a group ran on a processor instead, the others
// as and in the order they are: by group and processor (group * n_processors + processor); -1 where
// they cannot run, the memory does not suffice or the latency exceeds its limit. `order` are the
// tasks in the order in which the processors take them up.
//
// Thread: any. Errors: as place_tasks; PlanError if the order or a processor is none.
std::vector<double> moved_costs(const TaskGraph& graph, TaskObjective objective,
                                const std::vector<std::int64_t>& processors,
                                const std::vector<std::int64_t>& order,
                                const std::vector<std::vector<std::int64_t>>& groups,
                                std::int64_t latency_limit_ns = kNoLimit);

}  // namespace offload
