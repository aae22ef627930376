// The search over orders of tasks. Private to the core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "task_problem.hpp"

namespace offload {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// Penalty as a share of the value, for each task of mean size that exceeds a memory.
inline constexpr double kOverflow = 0.2;
// Chosen by experiment on random graphs of 16 to 500 tasks on 3 and 4 processors.
inline constexpr std::int64_t kTriesPerEvaluation = 10;  // moves that are not worth an evaluation
inline constexpr double kScreened = 0.95;  // of the moves whose estimate exceeds the limit

// Simulated annealing (S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, "Optimization by Simulated
// Annealing", Science 220, 1983) over orders and processors. Most moves change the critical path. A
// move is abandoned as soon as its beginning exceeds what can be accepted.
//
// Owner: the caller; the problem must outlive it. Thread: one at a time. Errors: none.
class OrderSearch {
 public:
  OrderSearch(const TaskProblem& problem, TaskObjective objective, const SearchLimits& limits)
      : problem_(problem),
        is_energy_(objective == TaskObjective::kEnergy),
        latency_limit_ns_(is_energy_ ? limits.latency_ns : kNever),
        bound_(is_energy_ ? problem.energy_bound() : static_cast<double>(problem.latency_bound())),
        draws_(limits.seed),
        n_(problem.n_tasks()),
        n_processors_(problem.n_processors()) {
    at_.resize(n_);
    end_ns_.resize(n_);
    tail_ns_.resize(n_);
    saved_ns_.resize(n_);
    free_ns_.resize((n_ + 1) * n_processors_);
    latest_ns_.resize(n_ + 1);
    now_ns_.resize(n_processors_);
    room_bytes_.resize(n_processors_);
    mark_.resize(n_);
    for (std::size_t p = 0; p < n_processors_; ++p) {
      const TaskGraph& graph = problem.graph();
      extra_watts_.push_back(graph.busy_watts[p] - graph.idle_watts[p]);
      idle_watts_ += graph.idle_watts[p];
    }
    double n_taking = 0, taken_bytes = 0;
    for (const std::int64_t bytes : problem.graph().memory_bytes) {
      taken_bytes += static_cast<double>(bytes);
      n_taking += bytes > 0 ? 1 : 0;
    }
    if (n_taking > 0) mean_bytes_ = taken_bytes / n_taking;
  }

  void weigh(double load_share) {
    if (is_energy_) return;
    extra_watts_.assign(n_processors_, load_share / static_cast<double>(n_processors_));
    idle_watts_ = 1 - load_share;
  }

  // Sets the current state, and the best if it is.
  void begin(const OrderedTasks& tasks) {
    tasks_ = tasks;
    for (std::size_t p = 0; p < n_processors_; ++p) room_bytes_[p] = problem_.memory_limit(p);
    busy_nj_ = 0;
    overflow_bytes_ = 0;
    for (std::uint32_t task = 0; task < n_; ++task) {
      const std::size_t p = tasks_.processors[task];
      room_bytes_[p] -= problem_.memory(task);
      busy_nj_ += busy_nj(task, p);
    }
    in_time_order();
    n_accepted_ = n_ + 1;
    overflow_weight_ = kOverflow * value_ / mean_bytes_;
    keep_best();
  }

  // The temperature falls with each evaluation; `hot` and `cold` are shares of the value.
  void anneal(std::int64_t n_evaluations, double hot, double cold) {
    const double cooling =
        std::pow(cold / hot, 1.0 / static_cast<double>(std::max<std::int64_t>(1, n_evaluations)));
    double temperature = hot;
    std::int64_t left = n_evaluations;
    for (std::int64_t tries = kTriesPerEvaluation * n_evaluations; left > 0 && tries > 0; --tries) {
      if (best_value_ <= bound_) return;
      const double limit = value_ - temperature * value_ * std::log(1.0 - draws_.fraction());
      if (!propose()) continue;
      if (estimate_ns_ > latency_limit(limit) && draws_.fraction() < kScreened) {
        done_ = first_;
        undo();
        continue;
      }
      --left;
      temperature *= cooling;
      settle(limit);
    }
  }

  // Moves one task after the other to each processor, as long as that helps.
  void descend(std::int64_t n_evaluations) {
    std::int64_t left = n_evaluations;
    for (std::size_t n_failed = 0, next = 0; n_failed < n_ * n_processors_ && left > 0; ++next) {
      const auto task = static_cast<std::uint32_t>(next / n_processors_ % n_);
      const std::size_t to = next % n_processors_;
      ++n_failed;
      clear_move();
      if (!move_to(task, to)) continue;
      --left;
      const double before = value_;
      if (settle(std::nextafter(value_, -1)) && value_ < before) n_failed = 0;
    }
  }

  const OrderedTasks& best() const { return best_; }
  double best_value() const { return best_value_; }
  std::int64_t n_evaluations() const { return n_evaluations_; }

 private:
  struct Moved {
    std::uint32_t task;
    std::uint32_t from;
  };
  // A task of the critical path, and the task that it waited for.
  struct Critical {
    std::uint32_t task;
    std::uint32_t waits_for;
    bool is_transfer;  // from another processor
    bool is_queue;     // for a task on its processor of which it reads nothing
  };

  double busy_nj(std::uint32_t task, std::size_t p) const {
    return static_cast<double>(problem_.cost(task, p)) * extra_watts_[p];
  }
  double value_at(std::int64_t latency_ns) const {
    return busy_nj_ + idle_watts_ * static_cast<double>(latency_ns);
  }

  void keep_best() {
    if (overflow_bytes_ > 0) return;
    const double value = is_energy_ ? value_ : static_cast<double>(latency_ns_);
    if (has_best_ && value >= best_value_) return;
    has_best_ = true;
    best_ = tasks_;
    best_value_ = value;
  }

  // Sorts tasks by their beginnings, which changes no time.
  void in_time_order() {
    first_ = 0;
    for (std::uint32_t at = 0; at < n_; ++at) at_[tasks_.order[at]] = at;
    std::fill(free_ns_.begin(), free_ns_.begin() + static_cast<std::ptrdiff_t>(n_processors_), 0);
    evaluate(kNever);
    const auto begin_ns = [this](std::uint32_t task) {
      return end_ns_[task] - problem_.cost(task, tasks_.processors[task]);
    };
    const std::vector<std::uint32_t>& rank = problem_.rank_in_topological();
    std::sort(tasks_.order.begin(), tasks_.order.end(),
              [&](std::uint32_t one, std::uint32_t other) {
                const std::int64_t begins[] = {begin_ns(one), begin_ns(other)};
                if (begins[0] != begins[1]) return begins[0] < begins[1];
                if (end_ns_[one] != end_ns_[other]) return end_ns_[one] < end_ns_[other];
                return rank[one] < rank[other];
              });
    for (std::uint32_t at = 0; at < n_; ++at) at_[tasks_.order[at]] = at;
    evaluate(kNever);
    accept();
  }

  // Computes times from the first changed place on. Returns false if the limit cannot be met.
  bool evaluate(std::int64_t limit_ns) {
    const std::size_t n_processors = n_processors_;
    std::copy_n(free_ns_.begin() + static_cast<std::ptrdiff_t>(first_ * n_processors), n_processors,
                now_ns_.begin());
    std::int64_t latest_ns = latest_ns_[first_];
    for (done_ = first_; done_ < n_; ++done_) {
      const std::uint32_t task = tasks_.order[done_];
      const std::size_t processor = tasks_.processors[task];
      std::int64_t begin_ns = now_ns_[processor];
      for (const TaskEnd& end : problem_.producers(task)) {
        begin_ns = std::max(
            begin_ns, end_ns_[end.task] +
                          problem_.transfer(end.edge, tasks_.processors[end.task], processor));
      }
      if (begin_ns + problem_.tail(task, processor) > limit_ns) return false;
      saved_ns_[done_] = end_ns_[task];
      end_ns_[task] = now_ns_[processor] = begin_ns + problem_.cost(task, processor);
      latest_ns = std::max(latest_ns, end_ns_[task]);
    }
    new_latency_ns_ = latest_ns;
    return true;
  }

  void accept() {
    std::int64_t* row = free_ns_.data() + first_ * n_processors_;
    for (std::size_t at = first_; at < n_; ++at, row += n_processors_) {
      const std::uint32_t task = tasks_.order[at];
      for (std::size_t p = 0; p < n_processors_; ++p) row[n_processors_ + p] = row[p];
      row[n_processors_ + tasks_.processors[task]] = end_ns_[task];
      latest_ns_[at + 1] = std::max(latest_ns_[at], end_ns_[task]);
    }
    latency_ns_ = latest_ns_[n_];
    value_ = value_at(latency_ns_);
    ++n_accepted_;
  }

  void undo() {
    for (std::size_t at = first_; at < done_; ++at) end_ns_[tasks_.order[at]] = saved_ns_[at];
    for (auto one = shifts_.rbegin(); one != shifts_.rend(); ++one) shift(one->second, one->first);
    for (const Moved& one : moved_) {
      if (const std::int64_t bytes = problem_.memory(one.task); bytes > 0) {
        take(one.from, bytes);
        take(tasks_.processors[one.task], -bytes);
      }
      tasks_.processors[one.task] = one.from;
    }
    busy_nj_ = saved_nj_;
  }

  // The latest end of the last task for a value.
  std::int64_t latency_limit(double limit) const {
    std::int64_t limit_ns = latency_limit_ns_;
    {
      if (idle_watts_ > 0) {
        const double most_ns = (limit - busy_nj_) / idle_watts_;
        if (most_ns < 0x1p62)
          limit_ns = std::min(limit_ns, static_cast<std::int64_t>(std::floor(most_ns)));
      } else if (busy_nj_ > limit) {
        limit_ns = -1;
      }
    }
    return limit_ns;
  }

  // Keeps the move if its value is at most the limit; otherwise undoes it.
  bool settle(double limit) {
    ++n_evaluations_;
    const std::int64_t limit_ns = latency_limit(limit);
    done_ = first_;
    if (limit_ns < 0 || !evaluate(limit_ns) || value_at(new_latency_ns_) > limit) {
      undo();
      return false;
    }
    accept();
    keep_best();
    return true;
  }

  void shift(std::size_t from, std::size_t to) {
    const auto begin = tasks_.order.begin();
    const auto a = static_cast<std::ptrdiff_t>(from);
    const auto b = static_cast<std::ptrdiff_t>(to);
    if (from < to) {
      std::rotate(begin + a, begin + a + 1, begin + b + 1);
    } else {
      std::rotate(begin + b, begin + a, begin + a + 1);
    }
    for (std::size_t at = std::min(from, to); at <= std::max(from, to); ++at) {
      at_[tasks_.order[at]] = static_cast<std::uint32_t>(at);
    }
  }

  // Takes bytes of a processor's memory; negative bytes give back. Overflow is penalised, so that
  // tasks can exchange places that do not fit one by one.
  void take(std::size_t processor, std::int64_t bytes) {
    std::int64_t& room = room_bytes_[processor];
    overflow_bytes_ -= std::max<std::int64_t>(0, -room);
    room -= bytes;
    overflow_bytes_ += std::max<std::int64_t>(0, -room);
  }

  // ---- moves ----

  void clear_move();
  bool move_to(std::uint32_t task, std::size_t to);
  // The places that a task may take in the order: after its producers, before its consumers.
  std::pair<std::size_t, std::size_t> window(std::uint32_t task) const;
  bool place_at(std::uint32_t task, std::size_t to);
  // For each task, the time from its beginning to the end of this schedule.
  void find_tails();
  // Puts it where the longest path through it is shortest, by the known times of other tasks.
  bool place_well(std::uint32_t task);
  // The first place from `place` on with another task of a processor; n_ if there is none.
  std::size_t next_on(std::size_t processor, std::size_t place, std::uint32_t but) const;
  bool place_anywhere(std::uint32_t task);
  bool propose();
  std::uint32_t any_task();
  // A task of the critical path; for energy, as often any task, since all tasks use energy.
  Critical any_critical();
  std::size_t other_processor(std::size_t than);
  bool move_critical();
  bool reorder_critical();
  // Moves connected tasks from one processor to another.
  bool move_group();
  // Exchanges the processors of two tasks.
  bool exchange();
  bool move_any();
  // Follows what each task waited for, from the task that ends last.
  void find_path();

  const TaskProblem& problem_;
  const bool is_energy_;
  const std::int64_t latency_limit_ns_;
  const double bound_;  // lower bound of all values
  Draws draws_;
  const std::size_t n_, n_processors_;
  std::vector<double> extra_watts_;
  double idle_watts_ = 0;

  OrderedTasks tasks_;
  std::vector<std::uint32_t> at_;      // by task: its place in the order
  std::vector<std::int64_t> end_ns_;   // by task
  std::vector<std::int64_t> free_ns_;  // by place and processor: when it is free before that place
  std::vector<std::int64_t> latest_ns_;   // by place: the latest end before it
  std::vector<std::int64_t> room_bytes_;  // by processor
  std::int64_t latency_ns_ = 0;
  double busy_nj_ = 0;
  double mean_bytes_ = 1;  // of tasks with memory
  std::int64_t overflow_bytes_ = 0;
  double overflow_weight_ = 0;
  double value_ = 0;

  std::vector<Moved> moved_;
  std::vector<std::pair<std::size_t, std::size_t>> shifts_;  // moves within the order, from and to
  std::size_t first_ = 0;                                    // the first changed place
  std::size_t done_ = 0;  // times before this place are those of the move
  std::vector<std::int64_t> saved_ns_, now_ns_;
  std::int64_t new_latency_ns_ = 0;
  double saved_nj_ = 0;
  std::int64_t estimate_ns_ = 0;

  std::vector<Critical> path_;
  std::size_t n_accepted_ = 0;         // since the path was found
  std::vector<std::int64_t> tail_ns_;  // by task
  std::vector<std::uint32_t> group_, mark_;
  std::uint32_t n_marks_ = 0;

  OrderedTasks best_;
  double best_value_ = 0;
  bool has_best_ = false;
  std::int64_t n_evaluations_ = 0;
};

}  // namespace offload
