#include <algorithm>
#include <utility>

#include "task_order_search.hpp"

namespace offload {
namespace {

constexpr double kPlaced = 0.8;  // share of the tasks that move to another processor
constexpr double kPlacedWell = 0.8;
// Tasks of the graph for each move by which the critical path and tails may be out of date.
constexpr std::size_t kTasksPerStaleMove = 64;
constexpr std::size_t kLeastGroup = 2;
constexpr std::size_t kGroupSizes = 15;
// Cumulative shares of the kinds of moves.
constexpr double kMovesCritical = 0.35;
constexpr double kReorders = 0.55;
constexpr double kMovesGroup = 0.75;
constexpr double kExchanges = 0.85;

}  // namespace

void OrderSearch::clear_move() {
  moved_.clear();
  shifts_.clear();
  first_ = n_;
  saved_nj_ = busy_nj_;
  estimate_ns_ = 0;
}

bool OrderSearch::move_to(std::uint32_t task, std::size_t to) {
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

std::pair<std::size_t, std::size_t> OrderSearch::window(std::uint32_t task) const {
  std::size_t low = 0, high = n_ - 1;
  for (const TaskEnd& end : problem_.producers(task)) {
    low = std::max<std::size_t>(low, at_[end.task] + 1);
  }
  for (const TaskEnd& end : problem_.consumers(task)) {
    high = std::min<std::size_t>(high, at_[end.task] - 1);
  }
  return {low, high};
}

bool OrderSearch::place_at(std::uint32_t task, std::size_t to) {
  const auto [low, high] = window(task);
  to = std::clamp(to, low, high);
  if (to == at_[task]) return false;
  const std::size_t from = at_[task];
  shifts_.emplace_back(from, to);
  shift(from, to);
  first_ = std::min({first_, from, to});
  return true;
}

void OrderSearch::find_tails() {
  std::fill(now_ns_.begin(), now_ns_.end(), 0);
  for (std::size_t at = n_; at-- > 0;) {
    const std::uint32_t task = tasks_.order[at];
    const std::size_t processor = tasks_.processors[task];
    std::int64_t behind_ns = now_ns_[processor];
    for (const TaskEnd& end : problem_.consumers(task)) {
      behind_ns = std::max(
          behind_ns,
          tail_ns_[end.task] + problem_.transfer(end.edge, processor, tasks_.processors[end.task]));
    }
    tail_ns_[task] = now_ns_[processor] = behind_ns + problem_.cost(task, processor);
  }
}

bool OrderSearch::place_well(std::uint32_t task) {
  const std::size_t processor = tasks_.processors[task];
  std::size_t low = 0, high = n_ - 1;
  std::int64_t ready_ns = 0, behind_ns = 0;
  for (const TaskEnd& end : problem_.producers(task)) {
    const std::size_t from = tasks_.processors[end.task];
    low = std::max<std::size_t>(low, at_[end.task] + 1);
    ready_ns = std::max(ready_ns, end_ns_[end.task] + problem_.transfer(end.edge, from, processor));
  }
  for (const TaskEnd& end : problem_.consumers(task)) {
    const std::size_t to = tasks_.processors[end.task];
    high = std::min<std::size_t>(high, at_[end.task] - 1);
    behind_ns =
        std::max(behind_ns, tail_ns_[end.task] + problem_.transfer(end.edge, processor, to));
  }
  std::int64_t last_end_ns = 0;
  for (std::size_t before = low; before-- > 0;) {
    const std::uint32_t one = tasks_.order[before];
    if (one != task && tasks_.processors[one] == processor) {
      last_end_ns = end_ns_[one];
      break;
    }
  }
  // The place in the order before which it goes: one place for each gap of its processor.
  std::size_t best = low, place = low, n_ties = 0;
  std::int64_t least_ns = kNever;
  while (true) {
    const std::size_t next = next_on(processor, place, task);
    const std::int64_t next_ns = next < n_ ? tail_ns_[tasks_.order[next]] : 0;
    const std::int64_t ns = std::max(last_end_ns, ready_ns) + std::max(behind_ns, next_ns);
    if (ns < least_ns) n_ties = 0;
    if (ns <= least_ns && (n_ties++ == 0 || draws_.below(n_ties) == 0)) best = place;
    least_ns = std::min(least_ns, ns);
    if (next > high) break;
    last_end_ns = end_ns_[tasks_.order[next]];
    place = next + 1;
  }
  estimate_ns_ = std::max(estimate_ns_, least_ns + problem_.cost(task, processor));
  return place_at(task, best > at_[task] ? best - 1 : best);
}

std::size_t OrderSearch::next_on(std::size_t processor, std::size_t place,
                                 std::uint32_t but) const {
  while (place < n_ &&
         (tasks_.order[place] == but || tasks_.processors[tasks_.order[place]] != processor)) {
    ++place;
  }
  return place;
}

bool OrderSearch::place_anywhere(std::uint32_t task) {
  if (draws_.fraction() < kPlacedWell) return place_well(task);
  const auto [low, high] = window(task);
  return place_at(task, low + draws_.below(high - low + 1));
}

bool OrderSearch::propose() {
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

std::uint32_t OrderSearch::any_task() { return static_cast<std::uint32_t>(draws_.below(n_)); }

OrderSearch::Critical OrderSearch::any_critical() {
  if (is_energy_ && draws_.below(2) == 0) {
    const std::uint32_t task = any_task();
    return {task, task, false, false};
  }
  return path_[draws_.below(path_.size())];
}

std::size_t OrderSearch::other_processor(std::size_t than) {
  const std::size_t drawn = draws_.below(n_processors_ - 1);
  return drawn + (drawn >= than ? 1 : 0);
}

bool OrderSearch::move_critical() {
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

bool OrderSearch::reorder_critical() {
  const Critical one = any_critical();
  if (!one.is_queue) return place_anywhere(one.task);
  if (draws_.below(2) == 0) return place_at(one.task, at_[one.waits_for]);
  return place_at(one.waits_for, at_[one.task]);
}

bool OrderSearch::move_group() {
  const Critical one = any_critical();
  const std::uint32_t seed = one.task;
  const std::size_t from = tasks_.processors[seed];
  const std::size_t to = one.is_transfer && draws_.below(2) == 0 ? tasks_.processors[one.waits_for]
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

bool OrderSearch::exchange() {
  const std::uint32_t one = any_critical().task;
  const std::uint32_t other = any_task();
  const std::size_t a = tasks_.processors[one], b = tasks_.processors[other];
  if (a == b || !problem_.can_run(one, b) || !problem_.can_run(other, a)) return false;
  return move_to(one, b) && move_to(other, a);
}

bool OrderSearch::move_any() {
  const std::uint32_t task = any_task();
  if (draws_.below(2) == 0) {
    if (!move_to(task, other_processor(tasks_.processors[task]))) return false;
    if (draws_.fraction() < kPlaced) place_anywhere(task);
    return true;
  }
  return place_anywhere(task);
}

void OrderSearch::find_path() {
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

}  // namespace offload
