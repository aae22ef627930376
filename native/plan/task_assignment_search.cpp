#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "task_problem.hpp"

namespace offload {
namespace {

// Bisections of the load of stages, and orders of processors that are tried for stages.
constexpr int kHalvings = 40;
constexpr std::size_t kMostStageOrders = 24;

// Temperatures as shares of the value; the first falls with the number of tasks above kHotTasks.
constexpr double kHot = 0.2;
constexpr double kHotTasks = 10;
constexpr double kCold = 0.001;
// By round of annealing, the share of the total load in the value.
constexpr double kLoadShares[] = {0.5, 0.2, 0.5};
// Penalty as a share of the value, for each task of mean size that exceeds a memory.
constexpr double kOverflow = 0.2;
constexpr int kDrawsForBusiest = 8;
constexpr std::size_t kMostGroup = 12;

// The processor of each task, so that the load of the busiest processor or link is least.
class AssignmentSearch {
 public:
  AssignmentSearch(const TaskProblem& problem, std::uint64_t seed)
      : problem_(problem),
        n_(problem.n_tasks()),
        n_processors_(problem.n_processors()),
        draws_(seed),
        mark_(n_) {
    double n_taking = 0, taken_bytes = 0;
    for (const std::int64_t bytes : problem.graph().memory_bytes) {
      taken_bytes += static_cast<double>(bytes);
      n_taking += bytes > 0 ? 1 : 0;
    }
    if (n_taking > 0) mean_bytes_ = taken_bytes / n_taking;
  }

  void begin(const Assignment& processors) {
    processors_ = processors;
    room_bytes_.resize(n_processors_);
    for (std::size_t p = 0; p < n_processors_; ++p) room_bytes_[p] = problem_.memory_limit(p);
    loads_.assign(n_processors_ * (n_processors_ + 1), 0);
    total_ns_ = 0;
    for (std::uint32_t task = 0; task < n_; ++task) {
      const std::size_t p = processors_[task];
      room_bytes_[p] -= problem_.memory(task);
      add(p, problem_.cost(task, p));
      for (const TaskEnd& end : problem_.consumers(task))
        add_transfer(end.edge, p, processors_[end.task], 1);
    }
    period_ns_ = *std::max_element(loads_.begin(), loads_.end());
    overflow_bytes_ = 0;
    overflow_weight_ = kOverflow * static_cast<double>(period_ns_) / mean_bytes_;
    keep_best();
  }

  void anneal(std::int64_t n_evaluations, double load_share) {
    load_share_ = load_share;
    const double hot = kHot * std::min(1.0, kHotTasks / static_cast<double>(n_));
    const double cold = std::min(kCold, hot);
    const double cooling =
        std::pow(cold / hot, 1.0 / static_cast<double>(std::max<std::int64_t>(1, n_evaluations)));
    double temperature = hot;
    std::int64_t left = n_evaluations;
    for (std::int64_t tries = 10 * n_evaluations; left > 0 && tries > 0; --tries) {
      if (best_period_ns_ <= problem_.period_bound()) return;
      const double before = value();
      moved_.clear();
      if (!propose()) continue;
      --left;
      ++n_evaluations_;
      temperature *= cooling;
      const std::int64_t last_ns =
          std::exchange(period_ns_, *std::max_element(loads_.begin(), loads_.end()));
      if (value() > before - temperature * before * std::log(1.0 - draws_.fraction())) {
        for (auto one = moved_.rbegin(); one != moved_.rend(); ++one) put(one->first, one->second);
        period_ns_ = last_ns;
      } else {
        keep_best();
      }
    }
  }

  const Assignment& best() const { return best_; }
  std::int64_t n_evaluations() const { return n_evaluations_; }

 private:
  double value() const {
    return (1 - load_share_) * static_cast<double>(period_ns_) +
           load_share_ * static_cast<double>(total_ns_) / static_cast<double>(n_processors_) +
           overflow_weight_ * static_cast<double>(overflow_bytes_);
  }

  void keep_best() {
    if (overflow_bytes_ > 0) return;
    if (!best_.empty() &&
        std::make_pair(period_ns_, total_ns_) >= std::make_pair(best_period_ns_, best_total_ns_)) {
      return;
    }
    best_ = processors_;
    best_period_ns_ = period_ns_;
    best_total_ns_ = total_ns_;
  }

  void add(std::size_t at, std::int64_t ns) {
    loads_[at] += ns;
    total_ns_ += ns;
  }
  void add_transfer(std::uint32_t edge, std::size_t from, std::size_t to, std::int64_t times) {
    add(n_processors_ + from * n_processors_ + to, times * problem_.transfer(edge, from, to));
  }

  // Takes bytes of a processor's memory; negative bytes give back. Overflow is penalised, so that
  // tasks can exchange places that do not fit one by one.
  void take(std::size_t processor, std::int64_t bytes) {
    std::int64_t& room = room_bytes_[processor];
    overflow_bytes_ -= std::max<std::int64_t>(0, -room);
    room -= bytes;
    overflow_bytes_ += std::max<std::int64_t>(0, -room);
  }

  void put(std::uint32_t task, std::size_t to) {
    const std::size_t from = processors_[task];
    add(from, -problem_.cost(task, from));
    add(to, problem_.cost(task, to));
    for (const TaskEnd& end : problem_.producers(task)) {
      add_transfer(end.edge, processors_[end.task], from, -1);
      add_transfer(end.edge, processors_[end.task], to, 1);
    }
    for (const TaskEnd& end : problem_.consumers(task)) {
      add_transfer(end.edge, from, processors_[end.task], -1);
      add_transfer(end.edge, to, processors_[end.task], 1);
    }
    take(from, -problem_.memory(task));
    take(to, problem_.memory(task));
    processors_[task] = static_cast<std::uint32_t>(to);
  }

  bool move_to(std::uint32_t task, std::size_t to) {
    const std::uint32_t from = processors_[task];
    if (from == to || !problem_.can_run(task, to)) return false;
    moved_.emplace_back(task, from);
    put(task, to);
    return true;
  }

  std::uint32_t any_task() { return static_cast<std::uint32_t>(draws_.below(n_)); }

  // Mostly a task of the busiest processor or link.
  std::uint32_t busy_task() {
    const auto busiest =
        static_cast<std::size_t>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
    std::uint32_t task = any_task();
    for (int draw = 0; draw < kDrawsForBusiest; ++draw, task = any_task()) {
      const std::size_t p = processors_[task];
      if (busiest < n_processors_ ? p == busiest
                                  : p == (busiest - n_processors_) / n_processors_ ||
                                        p == (busiest - n_processors_) % n_processors_) {
        break;
      }
    }
    return task;
  }

  bool propose() {
    const double kind = draws_.fraction();
    const std::uint32_t task = kind < 0.7 ? busy_task() : any_task();
    const std::size_t from = processors_[task];
    std::size_t to = draws_.below(n_processors_ - 1);
    to += to >= from ? 1 : 0;
    if (kind > 0.95) return rotate(task, any_task(), any_task());
    if (kind < 0.25 || kind > 0.85) return exchange(task, any_task());
    const std::size_t most = kind < 0.4 ? 2 + draws_.below(kMostGroup) : 1;
    group_.assign(1, task);
    mark_[task] = ++n_marks_;
    for (std::size_t at = 0; at < group_.size() && group_.size() < most; ++at) {
      for (const Row<TaskEnd>& row :
           {problem_.producers(group_[at]), problem_.consumers(group_[at])}) {
        for (const TaskEnd& end : row) {
          if (group_.size() >= most || mark_[end.task] == n_marks_ ||
              processors_[end.task] != from) {
            continue;
          }
          mark_[end.task] = n_marks_;
          group_.push_back(end.task);
        }
      }
    }
    bool has_moved = false;
    for (const std::uint32_t one : group_) has_moved = move_to(one, to) || has_moved;
    return has_moved;
  }

  bool exchange(std::uint32_t one, std::uint32_t other) {
    const std::uint32_t tasks[] = {one, other};
    return pass_on(tasks);
  }
  bool rotate(std::uint32_t one, std::uint32_t other, std::uint32_t third) {
    const std::uint32_t tasks[] = {one, other, third};
    return one != other && other != third && third != one && pass_on(tasks);
  }

  // Each task takes the processor of the next, the last task that of the first.
  template <std::size_t n_tasks>
  bool pass_on(const std::uint32_t (&tasks)[n_tasks]) {
    std::uint32_t from[n_tasks];
    for (std::size_t at = 0; at < n_tasks; ++at) from[at] = processors_[tasks[at]];
    for (std::size_t at = 0; at < n_tasks; ++at) {
      const std::uint32_t to = from[(at + 1) % n_tasks];
      if (from[at] == to || !problem_.can_run(tasks[at], to)) return false;
    }
    for (std::size_t at = 0; at < n_tasks; ++at) {
      moved_.emplace_back(tasks[at], from[at]);
      put(tasks[at], from[(at + 1) % n_tasks]);
    }
    return true;
  }

  const TaskProblem& problem_;
  const std::size_t n_, n_processors_;
  Draws draws_;
  Assignment processors_;
  std::vector<std::int64_t> room_bytes_;
  std::vector<std::int64_t> loads_;  // of processors, then of links
  std::int64_t total_ns_ = 0;
  std::int64_t period_ns_ = 0;
  double load_share_ = 0;
  double mean_bytes_ = 1;  // of tasks with memory
  std::int64_t overflow_bytes_ = 0;
  double overflow_weight_ = 0;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> moved_;  // and the previous processor
  std::vector<std::uint32_t> group_, mark_;
  std::uint32_t n_marks_ = 0;
  Assignment best_;
  std::int64_t best_period_ns_ = 0, best_total_ns_ = 0;
  std::int64_t n_evaluations_ = 0;
};

// Assigns tasks in topological order, to each processor as many as it can take. Empty if some are
// left.
Assignment fill_stages(const TaskProblem& problem, const std::vector<std::size_t>& processors,
                       std::int64_t most_ns) {
  Assignment found(problem.n_tasks());
  std::size_t stage = 0;
  std::int64_t load_ns = 0, bytes = 0;
  for (const std::uint32_t task : problem.topological()) {
    while (stage < processors.size()) {
      const std::size_t p = processors[stage];
      if (problem.can_run(task, p) && load_ns + problem.cost(task, p) <= most_ns &&
          bytes + problem.memory(task) <= problem.memory_limit(p)) {
        break;
      }
      ++stage;
      load_ns = bytes = 0;
    }
    if (stage == processors.size()) return {};
    found[task] = static_cast<std::uint32_t>(processors[stage]);
    load_ns += problem.cost(task, processors[stage]);
    bytes += problem.memory(task);
  }
  return found;
}

}  // namespace

Assignment pipeline_stages(const TaskProblem& problem) {
  Assignment best;
  std::int64_t best_ns = 0;
  std::vector<std::size_t> processors(problem.n_processors());
  std::iota(processors.begin(), processors.end(), std::size_t{0});
  std::int64_t most_ns = 0;
  for (std::size_t task = 0; task < problem.n_tasks(); ++task) {
    std::int64_t most = 0;
    for (const std::size_t p : processors) most = std::max(most, problem.cost(task, p));
    most_ns += most;
  }
  for (std::size_t n_orders = 0; n_orders < kMostStageOrders; ++n_orders) {
    std::int64_t low = problem.period_bound(), high = most_ns;
    for (int halving = 0; halving < kHalvings && low <= high; ++halving) {
      const std::int64_t middle = low + (high - low) / 2;
      const Assignment found = fill_stages(problem, processors, middle);
      if (found.empty()) {
        low = middle + 1;
        continue;
      }
      high = middle - 1;
      const std::int64_t period_ns = period_of(problem, found);
      if (best.empty() || period_ns < best_ns) {
        best = found;
        best_ns = period_ns;
      }
    }
    if (!std::next_permutation(processors.begin(), processors.end())) break;
  }
  return best;
}

SearchedAssignment search_assignment(const TaskProblem& problem,
                                     const std::vector<Assignment>& begins,
                                     const SearchLimits& limits) {
  AssignmentSearch search(problem, limits.seed);
  for (const Assignment& one : begins) search.begin(one);
  if (problem.n_processors() < 2 || problem.n_tasks() == 0) return {search.best(), 0};
  for (const double share : kLoadShares) {
    search.begin(search.best());
    search.anneal(limits.max_evaluations / static_cast<std::int64_t>(std::size(kLoadShares)),
                  share);
  }
  return {search.best(), search.n_evaluations()};
}

}  // namespace offload
