#include "offload/task_placement.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "task_problem.hpp"

namespace offload {
namespace {

void check_options(const TaskPlacementOptions& options) {
  if (!(options.max_slowdown >= 1 && std::isfinite(options.max_slowdown))) {
    throw PlanError("expected a slowdown of 1 or more, got " +
                    std::to_string(options.max_slowdown));
  }
  if (options.max_evaluations < 0) {
    throw PlanError("expected 0 evaluations or more, got " +
                    std::to_string(options.max_evaluations));
  }
}

// The candidates, their values, and the best of them.
class Choice {
 public:
  Choice(const TaskProblem& problem, TaskObjective objective)
      : problem_(problem), objective_(objective) {}

  void consider(const char* method, const OrderedTasks& tasks, std::int64_t latency_limit_ns = -1) {
    TaskPlacement placement = place_in_order(problem_, tasks);
    if (latency_limit_ns >= 0 && placement.latency_ns > latency_limit_ns) return;
    const double value = value_of(placement, objective_);
    const auto same = std::find_if(candidates_.begin(), candidates_.end(),
                                   [method](const auto& one) { return one.first == method; });
    if (same == candidates_.end()) {
      candidates_.emplace_back(method, value);
    } else {
      same->second = std::min(same->second, value);
    }
    if (!method_.empty() && !is_less(placement)) return;
    best_tasks_ = tasks;
    method_ = method;
    best_ = std::move(placement);
  }

  const OrderedTasks& best_tasks() const { return best_tasks_; }
  const TaskPlacement& best() const { return best_; }
  FoundPlacement found(std::int64_t n_evaluations) const {
    FoundPlacement result{best_, method_, n_evaluations, 0, 0, 0, candidates_};
    result.candidates.erase(std::remove_if(result.candidates.begin(), result.candidates.end(),
                                           [](const auto& one) { return one.first == "search"; }),
                            result.candidates.end());
    return result;
  }

 private:
  // Of equal values, the placement with less latency is better.
  bool is_less(const TaskPlacement& placement) const {
    const std::int64_t ns[] = {placement.latency_ns, best_.latency_ns};
    switch (objective_) {
      case TaskObjective::kLatency:
        return ns[0] < ns[1];
      case TaskObjective::kThroughput:
        return std::make_pair(placement.period_ns, ns[0]) < std::make_pair(best_.period_ns, ns[1]);
      case TaskObjective::kEnergy:
        break;
    }
    return std::make_pair(placement.energy_nj, ns[0]) < std::make_pair(best_.energy_nj, ns[1]);
  }

  const TaskProblem& problem_;
  const TaskObjective objective_;
  OrderedTasks best_tasks_;
  TaskPlacement best_;
  std::string method_;
  std::vector<std::pair<std::string, double>> candidates_;
};

std::vector<Candidate> feasible(const TaskProblem& problem) {
  std::vector<Candidate> found = portfolio(problem);
  if (found.empty()) {
    found.push_back({"fitted to memory", schedule_assigned(problem, fit_in_memory(problem))});
  }
  return found;
}

FoundPlacement place_for_latency(const TaskProblem& problem, const std::vector<Candidate>& all,
                                 const SearchLimits& limits) {
  Choice choice(problem, TaskObjective::kLatency);
  for (const Candidate& one : all) choice.consider(one.method, one.tasks);
  const Searched searched =
      search_order(problem, choice.best_tasks(), TaskObjective::kLatency, limits);
  choice.consider("search", searched.tasks);
  return choice.found(searched.n_evaluations);
}

FoundPlacement place_for_throughput(const TaskProblem& problem, const std::vector<Candidate>& all,
                                    const SearchLimits& limits) {
  Choice choice(problem, TaskObjective::kThroughput);
  std::vector<Assignment> begins;
  for (const Candidate& one : all) {
    choice.consider(one.method, one.tasks);
    begins.push_back(one.tasks.processors);
  }
  if (const Assignment stages = pipeline_stages(problem); !stages.empty()) {
    choice.consider("pipeline stages", schedule_assigned(problem, stages));
    begins.push_back(stages);
  }
  const SearchedAssignment searched = search_assignment(problem, begins, limits);
  choice.consider("search", schedule_assigned(problem, searched.processors));
  return choice.found(searched.n_evaluations);
}

// Each task where it takes the least energy, as far as memory allows; empty if it does not.
Assignment frugal(const TaskProblem& problem) {
  const TaskGraph& graph = problem.graph();
  Assignment found(problem.n_tasks());
  std::vector<std::int64_t> room_bytes(problem.n_processors());
  for (std::size_t p = 0; p < room_bytes.size(); ++p) room_bytes[p] = problem.memory_limit(p);
  for (const std::uint32_t task : problem.topological()) {
    std::size_t chosen = problem.n_processors();
    double least_nj = 0;
    for (std::size_t p = 0; p < problem.n_processors(); ++p) {
      if (!problem.can_run(task, p) || problem.memory(task) > room_bytes[p]) continue;
      const double nj =
          static_cast<double>(problem.cost(task, p)) * (graph.busy_watts[p] - graph.idle_watts[p]);
      if (chosen == problem.n_processors() || nj < least_nj) {
        chosen = p;
        least_nj = nj;
      }
    }
    if (chosen == problem.n_processors()) return {};
    found[task] = static_cast<std::uint32_t>(chosen);
    room_bytes[chosen] -= problem.memory(task);
  }
  return found;
}

FoundPlacement place_for_energy(const TaskProblem& problem, const std::vector<Candidate>& all,
                                const TaskPlacementOptions& options) {
  // Half of the search finds the least latency, to which the slowdown refers.
  const SearchLimits half{options.max_evaluations / 2, options.seed};
  Choice fast(problem, TaskObjective::kLatency);
  for (const Candidate& one : all) fast.consider(one.method, one.tasks);
  const Searched fastest = search_order(problem, fast.best_tasks(), TaskObjective::kLatency, half);
  fast.consider("search", fastest.tasks);
  const double most_ns =
      std::floor(static_cast<double>(fast.best().latency_ns) * options.max_slowdown);
  const std::int64_t limit_ns =
      std::max(fast.best().latency_ns,
               most_ns < 0x1p62 ? static_cast<std::int64_t>(most_ns) : std::int64_t{1} << 62);
  Choice choice(problem, TaskObjective::kEnergy);
  for (const Candidate& one : all) choice.consider(one.method, one.tasks, limit_ns);
  choice.consider("least latency", fastest.tasks, limit_ns);
  if (const Assignment least = frugal(problem); !least.empty()) {
    choice.consider("least energy", schedule_assigned(problem, least), limit_ns);
  }
  const Searched searched =
      search_order(problem, choice.best_tasks(), TaskObjective::kEnergy,
                   {options.max_evaluations - half.max_evaluations, options.seed, limit_ns});
  choice.consider("search", searched.tasks, limit_ns);
  FoundPlacement found = choice.found(fastest.n_evaluations + searched.n_evaluations);
  found.latency_limit_ns = limit_ns;
  return found;
}

OrderedTasks given_order(const TaskProblem& problem, const std::vector<std::int64_t>& processors,
                         const std::vector<std::int64_t>& order) {
  const std::size_t n = problem.n_tasks();
  if (processors.size() != n || order.size() != n) {
    throw PlanError("expected a processor for each task, and each task once in the order");
  }
  OrderedTasks tasks;
  std::vector<bool> is_there(n);
  for (const std::int64_t task : order) {
    const auto index = static_cast<std::size_t>(task);
    if (task < 0 || index >= n || is_there[index]) {
      throw PlanError("expected each task once in the order");
    }
    for (const TaskEnd& end : problem.producers(index)) {
      if (!is_there[end.task])
        throw PlanError("the order has a task before one whose results it reads");
    }
    is_there[index] = true;
    tasks.order.push_back(static_cast<std::uint32_t>(task));
  }
  for (std::size_t task = 0; task < n; ++task) {
    const std::int64_t p = processors[task];
    if (p < 0 || static_cast<std::size_t>(p) >= problem.n_processors() ||
        !problem.can_run(task, static_cast<std::size_t>(p))) {
      throw PlanError("task " + std::to_string(task) + ": processor " + std::to_string(p) +
                      " cannot run it, or does not exist");
    }
    tasks.processors.push_back(static_cast<std::uint32_t>(p));
  }
  return tasks;
}

// Moves a group to another processor. Returns false if that is not possible.
bool move_group(const TaskProblem& problem, const std::vector<std::int64_t>& group,
                std::uint32_t to, Assignment& processors) {
  for (const std::int64_t task : group) {
    if (task < 0 || static_cast<std::size_t>(task) >= problem.n_tasks()) {
      throw PlanError("a group has task " + std::to_string(task) + ", and there are " +
                      std::to_string(problem.n_tasks()));
    }
    if (!problem.can_run(static_cast<std::size_t>(task), to)) return false;
    processors[static_cast<std::size_t>(task)] = to;
  }
  std::int64_t bytes = 0;
  for (std::size_t task = 0; task < problem.n_tasks(); ++task) {
    if (processors[task] == to) bytes += problem.memory(task);
  }
  return bytes <= problem.memory_limit(to);
}

}  // namespace

FoundPlacement place_tasks(const TaskGraph& graph, const TaskPlacementOptions& options) {
  check_options(options);
  const TaskProblem problem(graph);
  if (problem.n_tasks() == 0) {
    FoundPlacement nothing;
    nothing.method = "nothing to place";
    return nothing;
  }
  const std::vector<Candidate> all = feasible(problem);
  const SearchLimits limits{options.max_evaluations, options.seed};
  FoundPlacement found;
  switch (options.objective) {
    case TaskObjective::kLatency:
      found = place_for_latency(problem, all, limits);
      break;
    case TaskObjective::kThroughput:
      found = place_for_throughput(problem, all, limits);
      break;
    case TaskObjective::kEnergy:
      found = place_for_energy(problem, all, options);
      break;
    default:
      throw PlanError("there is no such objective");
  }
  found.lower_bound_ns = options.objective == TaskObjective::kThroughput ? problem.period_bound()
                                                                         : problem.latency_bound();
  found.lower_bound_nj = problem.energy_bound();
  return found;
}

std::vector<double> moved_costs(const TaskGraph& graph, TaskObjective objective,
                                const std::vector<std::int64_t>& processors,
                                const std::vector<std::int64_t>& order,
                                const std::vector<std::vector<std::int64_t>>& groups,
                                std::int64_t latency_limit_ns) {
  const TaskProblem problem(graph);
  OrderedTasks tasks = given_order(problem, processors, order);
  std::vector<double> costs;
  costs.reserve(groups.size() * problem.n_processors());
  const Assignment before = tasks.processors;
  for (const std::vector<std::int64_t>& group : groups) {
    for (std::uint32_t to = 0; to < problem.n_processors(); ++to) {
      double value = -1;
      if (move_group(problem, group, to, tasks.processors)) {
        const TaskPlacement moved = place_in_order(problem, tasks);
        if (latency_limit_ns < 0 || moved.latency_ns <= latency_limit_ns) {
          value = value_of(moved, objective);
        }
      }
      costs.push_back(value);
      tasks.processors = before;
    }
  }
  return costs;
}

}  // namespace offload
