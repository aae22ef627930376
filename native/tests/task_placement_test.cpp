#include "offload/task_placement.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "offload/errors.hpp"

namespace {

using offload::FoundPlacement;
using offload::place_tasks;
using offload::TaskGraph;
using offload::TaskObjective;
using offload::TaskPlacementOptions;
using offload::test::Numbers;

using Integers = std::vector<std::int64_t>;

TaskGraph graph_of(std::size_t n_processors, Integers costs_ns) {
  TaskGraph graph;
  graph.n_processors = n_processors;
  graph.memory_bytes.assign(costs_ns.size() / n_processors, 0);
  graph.costs_ns = std::move(costs_ns);
  graph.links.assign(n_processors * n_processors, {0, 1e9});
  graph.memory_limits_bytes.assign(n_processors, offload::kNoLimit);
  graph.busy_watts.assign(n_processors, 2);
  graph.idle_watts.assign(n_processors, 1);
  return graph;
}

// Figure 3 of Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002.
TaskGraph golden() {
  TaskGraph graph = graph_of(3, {14, 16, 9, 13, 19, 18, 11, 13, 19, 13, 8,  17, 12, 13, 10,
                                 13, 16, 9, 7,  15, 11, 5,  11, 14, 18, 12, 20, 21, 7,  16});
  graph.edges = {{0, 1, 18}, {0, 2, 12}, {0, 3, 9},  {0, 4, 11}, {0, 5, 14},
                 {1, 7, 19}, {1, 8, 16}, {2, 6, 23}, {3, 7, 27}, {3, 8, 23},
                 {4, 8, 13}, {5, 7, 15}, {6, 9, 17}, {7, 9, 11}, {8, 9, 13}};
  return graph;
}

TaskGraph random_graph(std::size_t n_tasks, std::size_t n_processors, Numbers& numbers) {
  Integers costs_ns;
  for (std::size_t at = 0; at < n_tasks * n_processors; ++at) {
    costs_ns.push_back(numbers.below(9) == 0 ? offload::kCannotRun : numbers.below(100));
  }
  for (std::size_t task = 0; task < n_tasks; ++task) {
    costs_ns[task * n_processors + task % n_processors] = numbers.below(100);
  }
  TaskGraph graph = graph_of(n_processors, std::move(costs_ns));
  for (std::size_t task = 1; task < n_tasks; ++task) {
    for (std::int64_t left = numbers.below(4); left > 0; --left) {
      graph.edges.push_back({numbers.below(static_cast<std::int64_t>(task)),
                             static_cast<std::int64_t>(task), numbers.below(200)});
    }
  }
  std::int64_t total_bytes = 0;
  for (std::int64_t& bytes : graph.memory_bytes) total_bytes += bytes = numbers.below(50);
  for (std::int64_t& limit : graph.memory_limits_bytes) limit = total_bytes * 2 / 3;
  return graph;
}

// Whether tasks run one at a time on each processor, after what they read, and within memory.
bool is_right(const TaskGraph& graph, const offload::TaskPlacement& placement) {
  const std::size_t n_tasks = graph.memory_bytes.size();
  Integers bytes(graph.n_processors);
  for (std::size_t task = 0; task < n_tasks; ++task) {
    const auto p = static_cast<std::size_t>(placement.processors[task]);
    const std::int64_t cost_ns = graph.costs_ns[task * graph.n_processors + p];
    if (cost_ns < 0 || placement.end_ns[task] != placement.begin_ns[task] + cost_ns) return false;
    bytes[p] += graph.memory_bytes[task];
    for (std::size_t other = 0; other < task; ++other) {
      if (placement.processors[other] == placement.processors[task] &&
          placement.begin_ns[other] < placement.end_ns[task] &&
          placement.begin_ns[task] < placement.end_ns[other]) {
        return false;
      }
    }
  }
  for (const offload::TaskEdge& edge : graph.edges) {
    const auto from = static_cast<std::size_t>(edge.producer);
    const auto to = static_cast<std::size_t>(edge.consumer);
    const bool is_near = placement.processors[from] == placement.processors[to];
    if (placement.begin_ns[to] < placement.end_ns[from] + (is_near ? 0 : edge.size_bytes)) {
      return false;
    }
  }
  for (std::size_t p = 0; p < bytes.size(); ++p) {
    if (graph.memory_limits_bytes[p] >= 0 && bytes[p] > graph.memory_limits_bytes[p]) return false;
  }
  return true;
}

void test_the_golden_example() {
  TaskPlacementOptions options;
  options.max_evaluations = 0;
  CHECK_THAT(place_tasks(golden(), options).placement.latency_ns == 80);
  options.max_evaluations = 20'000;
  const FoundPlacement found = place_tasks(golden(), options);
  CHECK_THAT(found.placement.latency_ns == 73);
  CHECK_THAT(found.method == "search");
  CHECK_THAT(found.lower_bound_ns <= 73);
  CHECK_THAT(is_right(golden(), found.placement));
}

void test_all_objectives_of_random_graphs() {
  Numbers numbers(1);
  for (int round = 0; round < 40; ++round) {
    const TaskGraph graph = random_graph(static_cast<std::size_t>(1 + numbers.below(40)),
                                         static_cast<std::size_t>(2 + numbers.below(4)), numbers);
    for (const TaskObjective objective :
         {TaskObjective::kLatency, TaskObjective::kThroughput, TaskObjective::kEnergy}) {
      TaskPlacementOptions options;
      options.objective = objective;
      options.max_slowdown = 1.5;
      options.max_evaluations = 300;
      try {
        const FoundPlacement found = place_tasks(graph, options);
        CHECK_THAT(is_right(graph, found.placement));
        CHECK_THAT(found.lower_bound_ns <= (objective == TaskObjective::kThroughput
                                                ? found.placement.period_ns
                                                : found.placement.latency_ns));
        CHECK_THAT(found.lower_bound_nj <= found.placement.energy_nj);
        CHECK_THAT(place_tasks(graph, options).placement.processors == found.placement.processors);
      } catch (const offload::PlanError& error) {
        CHECK_THAT(std::string(error.what()).find("memory") != std::string::npos);
      }
    }
  }
}

void test_degenerate_graphs() {
  CHECK_THAT(place_tasks(graph_of(1, {}), {}).method == "nothing to place");
  CHECK_THAT(place_tasks({}, {}).placement.latency_ns == 0);
  CHECK_THAT(place_tasks(graph_of(1, {3, 4}), {}).placement.latency_ns == 7);
  CHECK_THAT(place_tasks(graph_of(2, {0, 0, 0, 0}), {}).placement.latency_ns == 0);
  const std::int64_t huge = (std::int64_t{1} << 61) - 1;
  CHECK_THAT(place_tasks(graph_of(2, {huge, huge, huge, huge}), {}).placement.latency_ns == huge);
  Integers wide(8'000);
  Numbers numbers(2);
  for (std::int64_t& cost : wide) cost = 1 + numbers.below(100);
  TaskPlacementOptions options;
  options.max_evaluations = 50;
  CHECK_THAT(place_tasks(graph_of(4, wide), options).placement.latency_ns > 0);
}

void test_groups_that_move() {
  const FoundPlacement found = place_tasks(golden(), {});
  const offload::TaskPlacement& placement = found.placement;
  Integers order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t one, std::int64_t other) {
    return placement.begin_ns[static_cast<std::size_t>(one)] <
           placement.begin_ns[static_cast<std::size_t>(other)];
  });
  const std::vector<double> costs = offload::moved_costs(
      golden(), TaskObjective::kLatency, placement.processors, order, {{0}, {3, 5}, {}});
  CHECK_THAT(costs.size() == 9);
  CHECK_THAT(costs[static_cast<std::size_t>(placement.processors[0])] == 73);
  CHECK_THAT(costs[6] == 73);
  const std::vector<double> late = offload::moved_costs(golden(), TaskObjective::kLatency,
                                                        placement.processors, order, {{0}}, 73);
  CHECK_THAT(std::count(late.begin(), late.end(), -1.0) == 2);
}

std::string error_of(const TaskGraph& graph, const TaskPlacementOptions& options = {}) {
  try {
    place_tasks(graph, options);
  } catch (const offload::PlanError& error) {
    return error.what();
  }
  return "";
}

// Consecutive stages are the best of the portfolio; a few changes of them suffice.
void test_the_search_continues_from_pipeline_stages() {
  TaskGraph graph =
      graph_of(4, {16, 25, 7, 29, 26, 9, 25, 4, 28, 23, 19, 22, 18, 8, 17, 12, 18, 16, 26, 28});
  graph.edges = {{0, 1, 1}, {1, 2, 19}, {2, 3, 17}, {2, 4, 3}};
  TaskPlacementOptions options;
  options.objective = TaskObjective::kThroughput;
  options.max_evaluations = 0;
  const FoundPlacement stages = place_tasks(graph, options);
  CHECK_THAT(stages.method == "pipeline stages" && stages.placement.period_ns == 24);
  options.max_evaluations = 20;
  const FoundPlacement found = place_tasks(graph, options);
  CHECK_THAT(found.placement.period_ns == found.lower_bound_ns);
  CHECK_THAT(is_right(graph, found.placement));
}

void test_bad_input_is_refused() {
  TaskGraph graph = golden();
  graph.edges.push_back({9, 0, 1});
  CHECK_THAT(error_of(graph).find("cycle") != std::string::npos);
  graph = golden();
  graph.edges.push_back({9, 10, 1});
  CHECK_THAT(error_of(graph).find("10 tasks") != std::string::npos);
  CHECK_THAT(error_of(graph_of(2, {-2, 1})).find("negative cost") != std::string::npos);
  CHECK_THAT(error_of(graph_of(2, {-1, -1})).find("no processor") != std::string::npos);
  graph = golden();
  graph.costs_ns.pop_back();
  CHECK_THAT(!error_of(graph).empty());
  graph = golden();
  graph.memory_bytes.assign(10, 10);
  graph.memory_limits_bytes.assign(3, 29);
  CHECK_THAT(error_of(graph).find("do not fit") != std::string::npos);
  TaskPlacementOptions options;
  options.max_slowdown = 0.5;
  CHECK_THAT(!error_of(golden(), options).empty());
  options = {};
  options.objective = static_cast<TaskObjective>(7);
  CHECK_THAT(!error_of(golden(), options).empty());
  options = {};
  options.max_evaluations = -1;
  CHECK_THAT(!error_of(golden(), options).empty());
}

}  // namespace

int main() {
  test_the_search_continues_from_pipeline_stages();
  test_the_golden_example();
  test_all_objectives_of_random_graphs();
  test_degenerate_graphs();
  test_groups_that_move();
  test_bad_input_is_refused();
  return offload::test::result();
}
