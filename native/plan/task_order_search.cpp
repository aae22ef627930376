#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "task_problem.hpp"

namespace offload {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// Chosen by experiment on random graphs of 16 to 500 tasks on 3 and 4 processors.
constexpr std::int64_t kTriesPerEvaluation = 10;  // moves that are not worth an evaluation
constexpr double kScreened = 0.95;                // of the moves whose estimate is beyond the limit
constexpr double kPlaced = 0.8;                   // of the tasks that move to another processor
constexpr double kPlacedWell = 0.8;
// The critical path and the tails of a graph of so many tasks may be those of one move before.
constexpr std::size_t kTasksPerStaleMove = 64;
// By so much of the value, for each task of mean size that is too much for a memory.
constexpr double kOverflow = 0.2;
constexpr std::size_t kLeastGroup = 2;
constexpr std::size_t kGroupSizes = 15;
// Temperatures as shares of the value, of graphs of up to so many tasks; of larger ones lower.
constexpr double kHot = 0.02;
constexpr double kCold = 0.002;
constexpr double kSmallGraph = 40;
constexpr double kSmallForEnergy = 8;
constexpr double kCooler = 1.7;  // the power with which they sink

// What moves are, up to so much of all.
constexpr double kMovesCritical = 0.35;
constexpr double kReorders = 0.55;
constexpr double kMovesGroup = 0.75;
constexpr double kExchanges = 0.85;

// One round of annealing: of its value how much is what processors have to do, as latency alone
// tells few placements apart; and how much hotter it is.
struct Round {
  double load_share;
  double heat;
};
constexpr Round kRounds[] = {{0.7, 1}, {0.3, 3}, {0.7, 1}};

// Simulated annealing (S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, "Optimization by Simulated
// Annealing", Science 220, 1983) over orders and processors. Most moves change what the critical
// path goes through. A move is given up as soon as what it begins with cannot be taken any more.
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

  // Takes it as the state to go on from, and as the best if it is.
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

  // The temperature sinks from evaluation to evaluation; both are shares of the value.
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

  // One task after the other to each processor, as long as that helps.
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
  // A task of the critical path, and what it waited for.
  struct Critical {
    std::uint32_t task;
    std::uint32_t waits_for;
    bool is_transfer;  // from another processor
    bool is_queue;     // for a task on its processor that it reads nothing of
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

  // Puts tasks in the order in which they begin, which changes no time.
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

  // Times from the first place that changed. False: it cannot be done within a limit.
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

  // Until when the last task has to end for a value.
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

  // Takes the move if its value is at most the limit; otherwise it never was.
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

  // Of a processor's memory, or back. What it lacks then is a price, so that tasks can change
  // places that do not fit one by one.
  void take(std::size_t processor, std::int64_t bytes) {
    std::int64_t& room = room_bytes_[processor];
    overflow_bytes_ -= std::max<std::int64_t>(0, -room);
    room -= bytes;
    overflow_bytes_ += std::max<std::int64_t>(0, -room);
  }

  // ---- moves ----

  void clear_move() {
    moved_.clear();
    shifts_.clear();
    first_ = n_;
    saved_nj_ = busy_nj_;
    estimate_ns_ = 0;
  }

  bool move_to(std::uint32_t task, std::size_t to) {
    const std::uint32_t from = tasks_.processors[task];
    if (from == to || !problem_.can_run(task, to)) return false;
    moved_.push_back({task, from});
    tasks_.processors[task] = static_cast<std::uint32_t>(to);
    if (const std::int64_t bytes = problem_.memory(task); bytes > 0) {
      const std::int64_t before = overflow_bytes_;
      take(to, bytes);
      take(from, -bytes);
      busy_nj_ += overflow_weight_ * static_cast<double>(overflow_bytes_ - before);
    }
    busy_nj_ += busy_nj(task, to) - busy_nj(task, from);
    first_ = std::min<std::size_t>(first_, at_[task]);
    return true;
  }

  // The places that a task may take in the order: behind its producers, before its consumers.
  std::pair<std::size_t, std::size_t> window(std::uint32_t task) const {
    std::size_t low = 0, high = n_ - 1;
    for (const TaskEnd& end : problem_.producers(task)) {
      low = std::max<std::size_t>(low, at_[end.task] + 1);
    }
    for (const TaskEnd& end : problem_.consumers(task)) {
      high = std::min<std::size_t>(high, at_[end.task] - 1);
    }
    return {low, high};
  }

  bool place_at(std::uint32_t task, std::size_t to) {
    const auto [low, high] = window(task);
    to = std::clamp(to, low, high);
    if (to == at_[task]) return false;
    const std::size_t from = at_[task];
    shifts_.emplace_back(from, to);
    shift(from, to);
    first_ = std::min({first_, from, to});
    return true;
  }

  // What follows the begin of each task in this schedule.
  void find_tails() {
    std::fill(now_ns_.begin(), now_ns_.end(), 0);
    for (std::size_t at = n_; at-- > 0;) {
      const std::uint32_t task = tasks_.order[at];
      const std::size_t processor = tasks_.processors[task];
      std::int64_t behind_ns = now_ns_[processor];
      for (const TaskEnd& end : problem_.consumers(task)) {
        behind_ns = std::max(
            behind_ns, tail_ns_[end.task] +
                           problem_.transfer(end.edge, processor, tasks_.processors[end.task]));
      }
      tail_ns_[task] = now_ns_[processor] = behind_ns + problem_.cost(task, processor);
    }
  }

  // Where it makes the least of the longest way through it, as far as times of others tell.
  bool place_well(std::uint32_t task) {
    const std::size_t processor = tasks_.processors[task];
    std::size_t low = 0, high = n_ - 1;
    std::int64_t ready_ns = 0, behind_ns = 0;
    for (const TaskEnd& end : problem_.producers(task)) {
      low = std::max<std::size_t>(low, at_[end.task] + 1);
      ready_ns = std::max(
          ready_ns,
          end_ns_[end.task] + problem_.transfer(end.edge, tasks_.processors[end.task], processor));
    }
    for (const TaskEnd& end : problem_.consumers(task)) {
      high = std::min<std::size_t>(high, at_[end.task] - 1);
      behind_ns = std::max(
          behind_ns,
          tail_ns_[end.task] + problem_.transfer(end.edge, processor, tasks_.processors[end.task]));
    }
    // Places in the order with the task taken out of it.
    std::size_t at = low;
    std::int64_t last_end_ns = 0;
    for (std::size_t before = low; before-- > 0;) {
      const std::uint32_t one = tasks_.order[before];
      if (one != task && tasks_.processors[one] == processor) {
        last_end_ns = end_ns_[one];
        break;
      }
    }
    std::size_t best = n_;
    std::int64_t least_ns = 0;
    std::size_t n_ties = 0;
    std::size_t begin_of_gap = low;
    for (;; ++at) {
      const bool is_last = at > high;
      const std::uint32_t one = at < n_ ? tasks_.order[at] : task;
      if (at < n_ && (one == task || tasks_.processors[one] != processor)) {
        if (!is_last) continue;
        // the next one on the processor
        std::size_t behind = at;
        while (behind < n_ && (tasks_.order[behind] == task ||
                               tasks_.processors[tasks_.order[behind]] != processor))
          ++behind;
        consider(begin_of_gap, last_end_ns, ready_ns,
                 std::max(behind_ns, behind < n_ ? tail_ns_[tasks_.order[behind]] : 0), best,
                 least_ns, n_ties);
        break;
      }
      consider(begin_of_gap, last_end_ns, ready_ns,
               std::max(behind_ns, at < n_ ? tail_ns_[one] : 0), best, least_ns, n_ties);
      if (is_last) break;
      last_end_ns = end_ns_[one];
      begin_of_gap = at + 1;
    }
    // `best` counts places before which others stand; its own old place falls out of them.
    estimate_ns_ = std::max(estimate_ns_, least_ns + problem_.cost(task, processor));
    const std::size_t to = best > at_[task] ? best - 1 : best;
    return place_at(task, to);
  }

  void consider(std::size_t at, std::int64_t last_end_ns, std::int64_t ready_ns,
                std::int64_t behind_ns, std::size_t& best, std::int64_t& least_ns,
                std::size_t& n_ties) {
    const std::int64_t ns = std::max(last_end_ns, ready_ns) + behind_ns;
    if (best == n_ || ns < least_ns) {
      best = at;
      least_ns = ns;
      n_ties = 1;
    } else if (ns == least_ns && draws_.below(++n_ties) == 0) {
      best = at;
    }
  }

  bool place_anywhere(std::uint32_t task) {
    if (draws_.fraction() < kPlacedWell) return place_well(task);
    const auto [low, high] = window(task);
    return place_at(task, low + draws_.below(high - low + 1));
  }

  bool propose() {
    clear_move();
    if (n_accepted_ > n_ / kTasksPerStaleMove) {
      find_path();
      find_tails();
      n_accepted_ = 0;
    }
    const double kind = draws_.fraction();
    if (kind < kMovesCritical) return move_critical();
    if (kind < kReorders) return reorder_critical();
    if (kind < kMovesGroup) return move_group();
    if (kind < kExchanges) return exchange();
    return move_any();
  }

  std::uint32_t any_task() { return static_cast<std::uint32_t>(draws_.below(n_)); }
  // Of the critical path; for energy, which all tasks take, as often any other one.
  Critical any_critical() {
    if (is_energy_ && draws_.below(2) == 0) {
      const std::uint32_t task = any_task();
      return {task, task, false, false};
    }
    return path_[draws_.below(path_.size())];
  }
  std::size_t other_processor(std::size_t than) {
    const std::size_t drawn = draws_.below(n_processors_ - 1);
    return drawn + (drawn >= than ? 1 : 0);
  }

  bool move_critical() {
    const Critical one = any_critical();
    std::uint32_t task = one.task;
    std::size_t to;
    if (one.is_transfer && draws_.below(2) == 0) {
      to = tasks_.processors[one.waits_for];
      if (draws_.below(2) == 0) {
        to = tasks_.processors[task];
        task = one.waits_for;
      }
    } else {
      if (one.is_queue && draws_.below(3) == 0) task = one.waits_for;
      to = other_processor(tasks_.processors[task]);
    }
    if (!move_to(task, to)) return false;
    if (draws_.fraction() < kPlaced) place_anywhere(task);
    return true;
  }

  bool reorder_critical() {
    const Critical one = any_critical();
    if (!one.is_queue) return place_anywhere(one.task);
    if (draws_.below(2) == 0) return place_at(one.task, at_[one.waits_for]);
    return place_at(one.waits_for, at_[one.task]);
  }

  // Tasks that read of one another, from one processor to another.
  bool move_group() {
    const Critical one = any_critical();
    const std::uint32_t seed = one.task;
    const std::size_t from = tasks_.processors[seed];
    const std::size_t to = one.is_transfer && draws_.below(2) == 0
                               ? tasks_.processors[one.waits_for]
                               : other_processor(from);
    group_.assign(1, seed);
    mark_[seed] = ++n_marks_;
    const std::size_t most = kLeastGroup + draws_.below(kGroupSizes);
    for (std::size_t at = 0; at < group_.size() && group_.size() < most; ++at) {
      for (const Row<TaskEnd>& row :
           {problem_.producers(group_[at]), problem_.consumers(group_[at])}) {
        for (const TaskEnd& end : row) {
          if (group_.size() >= most || mark_[end.task] == n_marks_ ||
              tasks_.processors[end.task] != from || draws_.below(4) == 0) {
            continue;
          }
          mark_[end.task] = n_marks_;
          group_.push_back(end.task);
        }
      }
    }
    bool has_moved = false;
    for (const std::uint32_t task : group_) has_moved = move_to(task, to) || has_moved;
    return has_moved;
  }

  // Two tasks take one another's processors.
  bool exchange() {
    const std::uint32_t one = any_critical().task;
    const std::uint32_t other = any_task();
    const std::size_t a = tasks_.processors[one], b = tasks_.processors[other];
    if (a == b || !problem_.can_run(one, b) || !problem_.can_run(other, a)) return false;
    return move_to(one, b) && move_to(other, a);
  }

  bool move_any() {
    const std::uint32_t task = any_task();
    if (draws_.below(2) == 0) {
      if (!move_to(task, other_processor(tasks_.processors[task]))) return false;
      if (draws_.fraction() < kPlaced) place_anywhere(task);
      return true;
    }
    return place_anywhere(task);
  }

  // Follows what each task waited for, from the one that ends last.
  void find_path() {
    path_.clear();
    std::uint32_t task = tasks_.order[0];
    for (const std::uint32_t one : tasks_.order) {
      if (end_ns_[one] > end_ns_[task]) task = one;
    }
    while (path_.size() <= n_) {
      const std::size_t processor = tasks_.processors[task];
      const std::int64_t begin_ns = end_ns_[task] - problem_.cost(task, processor);
      Critical one{task, task, false, false};
      std::size_t n_found = 0;
      for (const TaskEnd& end : problem_.producers(task)) {
        const std::size_t from = tasks_.processors[end.task];
        if (end_ns_[end.task] + problem_.transfer(end.edge, from, processor) != begin_ns) continue;
        if (draws_.below(++n_found) == 0) one = {task, end.task, from != processor, false};
      }
      if (begin_ns > 0 && free_ns_[at_[task] * n_processors_ + processor] == begin_ns) {
        std::size_t at = at_[task] - 1;
        while (tasks_.processors[tasks_.order[at]] != processor) --at;
        if (draws_.below(++n_found) == 0) one = {task, tasks_.order[at], false, true};
      }
      path_.push_back(one);
      if (n_found == 0) break;
      task = one.waits_for;
    }
  }

  const TaskProblem& problem_;
  const bool is_energy_;
  const std::int64_t latency_limit_ns_;
  const double bound_;  // no value is below it
  Draws draws_;
  const std::size_t n_, n_processors_;
  std::vector<double> extra_watts_;
  double idle_watts_ = 0;

  OrderedTasks tasks_;
  std::vector<std::uint32_t> at_;         // by task, its place in the order
  std::vector<std::int64_t> end_ns_;      // by task
  std::vector<std::int64_t> free_ns_;     // by place and processor, when that is free before
  std::vector<std::int64_t> latest_ns_;   // by place, the latest end before
  std::vector<std::int64_t> room_bytes_;  // by processor
  std::int64_t latency_ns_ = 0;
  double busy_nj_ = 0;
  double mean_bytes_ = 1;  // of tasks that take some
  std::int64_t overflow_bytes_ = 0;
  double overflow_weight_ = 0;
  double value_ = 0;

  std::vector<Moved> moved_;
  std::vector<std::pair<std::size_t, std::size_t>> shifts_;  // of the order, from where to where
  std::size_t first_ = 0;                                    // the first place that changed
  std::size_t done_ = 0;  // up to where times are those of the move
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
