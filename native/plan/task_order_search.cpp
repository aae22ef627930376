#include "task_order_search.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace offload {
namespace {

// Temperatures as shares of the value, for graphs of up to this many tasks; lower for larger ones.
constexpr double kHot = 0.02;
constexpr double kCold = 0.002;
constexpr double kSmallGraph = 40;
constexpr double kSmallForEnergy = 8;
constexpr double kCooler = 1.7;  // exponent of the decrease

// A round of annealing: the share of the processors' load in its value, as latency alone
// distinguishes few placements; and a factor of its temperature.
struct Round {
  double load_share;
  double heat;
};
constexpr Round kRounds[] = {{0.7, 1}, {0.3, 3}, {0.7, 1}};

}  // namespace

Searched search_order(const TaskProblem& problem, const OrderedTasks& begin,
                      TaskObjective objective, const SearchLimits& limits) {
  OrderSearch search(problem, objective, limits);
  search.weigh(0);
  search.begin(begin);
  if (problem.n_tasks() < 2 || problem.n_processors() < 2) return {search.best(), 0};
  const double least = objective == TaskObjective::kEnergy ? kSmallForEnergy : kSmallGraph;
  const double size = std::max(least, static_cast<double>(problem.n_tasks()));
  for (const Round& round : kRounds) {
    const double heat = round.heat * std::pow(kSmallGraph / size, kCooler);
    search.weigh(round.load_share);
    search.begin(search.best());
    search.anneal(limits.max_evaluations / static_cast<std::int64_t>(std::size(kRounds)),
                  kHot * heat, kCold * heat);
  }
  search.weigh(0);
  search.begin(search.best());
  search.descend(limits.max_evaluations - search.n_evaluations());
  return {search.best(), search.n_evaluations()};
}

}  // namespace offload
