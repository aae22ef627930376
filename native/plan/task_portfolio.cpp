#include <algorithm>
#include <numeric>
#include <queue>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "task_problem.hpp"

namespace offload {
namespace {

// When a processor is busy: disjoint blocks in order; consecutive tasks share a block.
class Timeline {
 public:
  // The first time from `ready_ns` on at which a task of this duration fits.
  std::int64_t first_fit(std::int64_t ready_ns, std::int64_t duration_ns) const {
    std::int64_t begin_ns = ready_ns;
    for (auto block = first_after(ready_ns); block != blocks_.end(); ++block) {
      if (begin_ns + duration_ns <= block->first) break;
      begin_ns = std::max(begin_ns, block->second);
    }
    return begin_ns;
  }

  void take(std::int64_t begin_ns, std::int64_t end_ns) {
    auto next = std::lower_bound(blocks_.begin(), blocks_.end(), std::make_pair(begin_ns, end_ns));
    const bool joins_next = next != blocks_.end() && next->first == end_ns;
    const bool joins_last = next != blocks_.begin() && std::prev(next)->second == begin_ns;
    if (joins_last && joins_next) {
      std::prev(next)->second = next->second;
      blocks_.erase(next);
    } else if (joins_last) {
      std::prev(next)->second = end_ns;
    } else if (joins_next) {
      next->first = begin_ns;
    } else {
      blocks_.insert(next, {begin_ns, end_ns});
    }
  }

 private:
  using Block = std::pair<std::int64_t, std::int64_t>;

  // The first block that ends after `ns`.
  std::vector<Block>::const_iterator first_after(std::int64_t ns) const {
    return std::partition_point(blocks_.begin(), blocks_.end(),
                                [ns](const Block& block) { return block.second <= ns; });
  }

  std::vector<Block> blocks_;
};

// Tasks that are placed one by one, each in a gap.
class ListSchedule {
 public:
  explicit ListSchedule(const TaskProblem& problem)
      : problem_(problem),
        timelines_(problem.n_processors()),
        room_bytes_(problem.n_processors()),
        begin_ns_(problem.n_tasks()),
        end_ns_(problem.n_tasks()),
        processors_(problem.n_tasks()) {
    for (std::size_t p = 0; p < room_bytes_.size(); ++p) room_bytes_[p] = problem.memory_limit(p);
  }

  bool fits(std::uint32_t task, std::size_t processor) const {
    return problem_.can_run(task, processor) && problem_.memory(task) <= room_bytes_[processor];
  }

  std::int64_t first_end(std::uint32_t task, std::size_t processor) const {
    std::int64_t ready_ns = 0;
    for (const TaskEnd& end : problem_.producers(task)) {
      ready_ns =
          std::max(ready_ns, end_ns_[end.task] +
                                 problem_.transfer(end.edge, processors_[end.task], processor));
    }
    const std::int64_t cost_ns = problem_.cost(task, processor);
    return timelines_[processor].first_fit(ready_ns, cost_ns) + cost_ns;
  }

  void place(std::uint32_t task, std::size_t processor) {
    end_ns_[task] = first_end(task, processor);
    begin_ns_[task] = end_ns_[task] - problem_.cost(task, processor);
    timelines_[processor].take(begin_ns_[task], end_ns_[task]);
    room_bytes_[processor] -= problem_.memory(task);
    processors_[task] = static_cast<std::uint32_t>(processor);
  }

  // Places the task where its end plus `added` is least. Returns false if no memory has room.
  template <typename Added>
  bool place_best(std::uint32_t task, Added added) {
    std::size_t chosen = problem_.n_processors();
    std::int64_t least = 0;
    for (std::size_t p = 0; p < problem_.n_processors(); ++p) {
      if (!fits(task, p)) continue;
      const std::int64_t ns = first_end(task, p) + added(p);
      if (chosen == problem_.n_processors() || ns < least) {
        chosen = p;
        least = ns;
      }
    }
    if (chosen == problem_.n_processors()) return false;
    place(task, chosen);
    return true;
  }

  // The order in which processors run tasks. A task of no duration precedes others that begin then.
  OrderedTasks in_order() const {
    OrderedTasks found{problem_.topological(), processors_};
    std::stable_sort(found.order.begin(), found.order.end(),
                     [this](std::uint32_t one, std::uint32_t other) {
                       return std::make_pair(begin_ns_[one], end_ns_[one]) <
                              std::make_pair(begin_ns_[other], end_ns_[other]);
                     });
    return found;
  }

 private:
  const TaskProblem& problem_;
  std::vector<Timeline> timelines_;
  std::vector<std::int64_t> room_bytes_;
  std::vector<std::int64_t> begin_ns_, end_ns_;
  Assignment processors_;
};

// Mean costs and transfers over processors, and the ranks of HEFT and CPOP.
class Ranks {
 public:
  explicit Ranks(const TaskProblem& problem)
      : upward(problem.n_tasks()), downward(problem.n_tasks()), costs(problem.n_tasks()) {
    find_costs(problem);
    std::vector<double> transfers = mean_transfers(problem);
    const std::vector<std::uint32_t>& order = problem.topological();
    for (auto task = order.rbegin(); task != order.rend(); ++task) {
      for (const TaskEnd& end : problem.consumers(*task)) {
        upward[*task] = std::max(upward[*task], transfers[end.edge] + upward[end.task]);
      }
      upward[*task] += costs[*task];
    }
    for (const std::uint32_t task : order) {
      for (const TaskEnd& end : problem.producers(task)) {
        downward[task] =
            std::max(downward[task], downward[end.task] + costs[end.task] + transfers[end.edge]);
      }
    }
  }

  std::vector<double> upward, downward, costs;

 private:
  void find_costs(const TaskProblem& problem) {
    for (std::size_t task = 0; task < costs.size(); ++task) {
      double sum = 0;
      double n_able = 0;
      for (std::size_t p = 0; p < problem.n_processors(); ++p) {
        if (!problem.can_run(task, p)) continue;
        sum += static_cast<double>(problem.cost(task, p));
        ++n_able;
      }
      costs[task] = sum / n_able;
    }
  }

  static std::vector<double> mean_transfers(const TaskProblem& problem) {
    const std::size_t n = problem.n_processors();
    std::vector<double> means(problem.graph().edges.size());
    if (n < 2) return means;
    for (std::uint32_t edge = 0; edge < means.size(); ++edge) {
      for (std::size_t from = 0; from < n; ++from) {
        for (std::size_t to = 0; to < n; ++to) {
          means[edge] += static_cast<double>(problem.transfer(edge, from, to));
        }
      }
      means[edge] /= static_cast<double>(n * (n - 1));
    }
    return means;
  }
};

std::vector<std::uint32_t> by_rank(const TaskProblem& problem, const std::vector<double>& ranks) {
  // No later task has a higher rank; tasks of equal rank stay in topological order.
  std::vector<std::uint32_t> order = problem.topological();
  std::stable_sort(order.begin(), order.end(), [&ranks](std::uint32_t one, std::uint32_t other) {
    return ranks[one] > ranks[other];
  });
  return order;
}

// Visits tasks whose producers were visited, in order of descending rank. Returns false if `place`
// did.
template <typename Place>
bool by_readiness(const TaskProblem& problem, const std::vector<double>& ranks, Place place) {
  using Ready = std::pair<double, std::int64_t>;  // of equal ranks, the first in topological order
  std::priority_queue<Ready> ready;
  std::vector<std::size_t> n_before(problem.n_tasks());
  const auto add = [&](std::uint32_t task) {
    ready.emplace(ranks[task], -static_cast<std::int64_t>(problem.rank_in_topological()[task]));
  };
  for (std::uint32_t task = 0; task < problem.n_tasks(); ++task) {
    n_before[task] = problem.producers(task).size();
    if (n_before[task] == 0) add(task);
  }
  while (!ready.empty()) {
    const std::uint32_t task = problem.topological()[static_cast<std::size_t>(-ready.top().second)];
    ready.pop();
    if (!place(task)) return false;
    for (const TaskEnd& end : problem.consumers(task)) {
      if (--n_before[end.task] == 0) add(end.task);
    }
  }
  return true;
}

std::int64_t nothing(std::size_t) { return 0; }

// Source: Topcuoglu, Hariri and Wu, 2002; with a table added to the end, Arabnejad and Barbosa.
void add_heft(const TaskProblem& problem, const Ranks& ranks, bool looks_ahead,
              std::vector<Candidate>& found) {
  ListSchedule schedule(problem);
  for (const std::uint32_t task : by_rank(problem, ranks.upward)) {
    const auto behind = [&](std::size_t p) {
      return looks_ahead ? problem.tail(task, p) - problem.cost(task, p) : 0;
    };
    if (!schedule.place_best(task, behind)) return;
  }
  found.push_back({looks_ahead ? "HEFT with lookahead" : "HEFT", schedule.in_order()});
}

// Source: H. Arabnejad and J. G. Barbosa, "List Scheduling Algorithm for Heterogeneous Systems by
// an Optimistic Cost Table", IEEE TPDS 25(3), 2014. Its table is a lower bound of what follows a
// task on a processor; here with the transfers of each link instead of their mean.
void add_peft(const TaskProblem& problem, std::vector<Candidate>& found) {
  std::vector<double> ranks(problem.n_tasks());
  for (std::size_t task = 0; task < ranks.size(); ++task) {
    double n_able = 0;
    for (std::size_t p = 0; p < problem.n_processors(); ++p) {
      if (!problem.can_run(task, p)) continue;
      ranks[task] += static_cast<double>(problem.tail(task, p) - problem.cost(task, p));
      ++n_able;
    }
    ranks[task] /= n_able;
  }
  ListSchedule schedule(problem);
  const bool is_placed = by_readiness(problem, ranks, [&](std::uint32_t task) {
    return schedule.place_best(
        task, [&](std::size_t p) { return problem.tail(task, p) - problem.cost(task, p); });
  });
  if (is_placed) found.push_back({"PEFT", schedule.in_order()});
}

// Source: as HEFT.
void add_cpop(const TaskProblem& problem, const Ranks& ranks, std::vector<Candidate>& found) {
  std::vector<double> through(problem.n_tasks());
  for (std::size_t task = 0; task < through.size(); ++task) {
    through[task] = ranks.upward[task] + ranks.downward[task];
  }
  const std::vector<std::uint32_t>& order = problem.topological();
  std::uint32_t at = order.front();
  for (const std::uint32_t task : order) {
    if (problem.producers(task).size() == 0 && through[task] > through[at]) at = task;
  }
  std::vector<bool> is_critical(problem.n_tasks());
  std::vector<std::uint32_t> path;
  while (true) {
    is_critical[at] = true;
    path.push_back(at);
    const Row<TaskEnd> behind = problem.consumers(at);
    if (behind.size() == 0) break;
    at = std::max_element(behind.begin(), behind.end(),
                          [&](const TaskEnd& one, const TaskEnd& other) {
                            return through[one.task] < through[other.task];
                          })
             ->task;
  }
  std::size_t chosen = problem.n_processors();
  std::int64_t least = 0;
  for (std::size_t p = 0; p < problem.n_processors(); ++p) {
    std::int64_t sum = 0;
    std::int64_t bytes = 0;
    bool can_run = true;
    for (const std::uint32_t task : path) {
      can_run = can_run && problem.can_run(task, p);
      sum += problem.cost(task, p);
      bytes += problem.memory(task);
    }
    if (!can_run || bytes > problem.memory_limit(p)) continue;
    if (chosen == problem.n_processors() || sum < least) {
      chosen = p;
      least = sum;
    }
  }
  if (chosen == problem.n_processors()) return;
  ListSchedule schedule(problem);
  const bool is_placed = by_readiness(problem, through, [&](std::uint32_t task) {
    if (!is_critical[task]) return schedule.place_best(task, nothing);
    if (!schedule.fits(task, chosen)) return false;
    schedule.place(task, chosen);
    return true;
  });
  if (is_placed) found.push_back({"CPOP", schedule.in_order()});
}

bool has_memory(const TaskProblem& problem, const Assignment& processors) {
  std::vector<std::int64_t> bytes(problem.n_processors());
  for (std::uint32_t task = 0; task < problem.n_tasks(); ++task) {
    bytes[processors[task]] += problem.memory(task);
  }
  for (std::size_t p = 0; p < bytes.size(); ++p) {
    if (bytes[p] > problem.memory_limit(p)) return false;
  }
  return true;
}

void add_single(const TaskProblem& problem, const std::vector<std::uint32_t>& order,
                std::vector<Candidate>& found) {
  for (std::uint32_t p = 0; p < problem.n_processors(); ++p) {
    bool can_run = true;
    for (std::size_t task = 0; task < problem.n_tasks(); ++task) {
      can_run = can_run && problem.can_run(task, p);
    }
    const Assignment all(problem.n_tasks(), p);
    if (can_run && has_memory(problem, all)) found.push_back({"one processor", {order, all}});
  }
}

}  // namespace

std::vector<Candidate> portfolio(const TaskProblem& problem) {
  std::vector<Candidate> found;
  if (problem.n_tasks() == 0) return found;
  const Ranks ranks(problem);
  add_heft(problem, ranks, false, found);
  add_heft(problem, ranks, true, found);
  add_peft(problem, found);
  add_cpop(problem, ranks, found);
  add_single(problem, by_rank(problem, ranks.upward), found);
  if (problem.n_processors() > 1 && has_memory(problem, problem.balanced())) {
    found.push_back({"balanced loads", schedule_assigned(problem, problem.balanced())});
  }
  return found;
}

OrderedTasks schedule_assigned(const TaskProblem& problem, const Assignment& processors) {
  const Ranks ranks(problem);
  ListSchedule schedule(problem);
  for (const std::uint32_t task : by_rank(problem, ranks.upward)) {
    schedule.place(task, processors[task]);
  }
  return schedule.in_order();
}

}  // namespace offload
