#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "offload/errors.hpp"
#include "task_problem.hpp"

namespace offload {
namespace {

// Limits on decisions of the search for room.
constexpr std::int64_t kExchangeSteps = 300'000;
constexpr std::int64_t kFitSteps = 2'000'000;

constexpr const char* kProved = "the tasks do not fit, on whichever processors they run";

// Searches for room where heuristics found none: first the largest tasks, each where the most is
// left; then exchanges, while some memory overflows; last depth-first search, which can also prove
// that there is none.
class Fitting {
 public:
  explicit Fitting(const TaskProblem& problem) : problem_(problem), processors_(problem.n_tasks()) {
    for (std::size_t p = 0; p < problem.n_processors(); ++p) {
      room_bytes_.push_back(problem.memory_limit(p));
    }
    for (std::uint32_t task = 0; task < problem.n_tasks(); ++task) {
      if (problem.memory(task) > 0) {
        tasks_.push_back(task);
        continue;
      }
      while (!problem.can_run(task, processors_[task])) ++processors_[task];
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [&](std::uint32_t one, std::uint32_t other) {
      return problem.memory(one) > problem.memory(other);
    });
    options_.resize(tasks_.size());
    for (const std::uint32_t task : tasks_) {
      for (std::size_t p = 0; p < problem.n_processors(); ++p) {
        are_alike_ = are_alike_ && problem.can_run(task, p);
      }
    }
  }

  Assignment run() {
    prove_too_much();
    fill_emptiest();
    if (overflow_bytes() > 0 && !exchange()) search();
    return processors_;
  }

 private:
  // A memory holds at most a multiple of the greatest common divisor of all sizes, and at most as
  // many tasks as it holds of the smallest ones.
  void prove_too_much() const {
    std::int64_t unit = 0;
    std::int64_t bytes = 0;
    for (const std::uint32_t task : tasks_) {
      unit = std::gcd(unit, problem_.memory(task));
      bytes += problem_.memory(task);
    }
    if (tasks_.empty()) return;
    std::int64_t left = bytes;
    auto n_left = static_cast<std::int64_t>(tasks_.size());
    for (const std::int64_t room : room_bytes_) {
      left -= std::min(left, room / unit * unit);
      std::int64_t taken = 0;
      for (auto task = tasks_.rbegin(); task != tasks_.rend(); ++task, --n_left) {
        if ((taken += problem_.memory(*task)) > room) break;
      }
    }
    if (left > 0 || n_left > 0) refuse(kProved);
  }

  void put(std::uint32_t task, std::uint32_t to) {
    room_bytes_[processors_[task]] += problem_.memory(task);
    room_bytes_[to] -= problem_.memory(task);
    processors_[task] = to;
  }

  void fill_emptiest() {
    for (const std::uint32_t task : tasks_) {
      std::uint32_t chosen = 0;
      while (!problem_.can_run(task, chosen)) ++chosen;
      for (std::uint32_t p = chosen; p < problem_.n_processors(); ++p) {
        if (problem_.can_run(task, p) && room_bytes_[p] > room_bytes_[chosen]) chosen = p;
      }
      processors_[task] = chosen;
      room_bytes_[chosen] -= problem_.memory(task);
    }
  }

  std::int64_t overflow_bytes() const {
    std::int64_t bytes = 0;
    for (const std::int64_t room : room_bytes_) bytes += std::max<std::int64_t>(0, -room);
    return bytes;
  }

  // Moves and exchanges tasks at random, as long as the overflow does not grow.
  bool exchange() {
    Draws draws(0);
    std::int64_t lacking_bytes = overflow_bytes();
    for (std::int64_t step = 0; step < kExchangeSteps && lacking_bytes > 0; ++step) {
      const std::uint32_t one = tasks_[draws.below(tasks_.size())];
      const std::uint32_t other = tasks_[draws.below(tasks_.size())];
      const std::uint32_t a = processors_[one];
      const bool is_move = draws.below(4) == 0;
      const std::uint32_t b = is_move ? static_cast<std::uint32_t>(draws.below(room_bytes_.size()))
                                      : processors_[other];
      if (a == b || !problem_.can_run(one, b) || (!is_move && !problem_.can_run(other, a)))
        continue;
      put(one, b);
      if (!is_move) put(other, a);
      if (const std::int64_t bytes = overflow_bytes(); bytes <= lacking_bytes) {
        lacking_bytes = bytes;
        continue;
      }
      put(one, a);
      if (!is_move) put(other, b);
    }
    return lacking_bytes == 0;
  }

  // Depth-first search, the largest tasks first, each where the least is left.
  void search() {
    for (std::size_t p = 0; p < room_bytes_.size(); ++p) room_bytes_[p] = problem_.memory_limit(p);
    std::size_t depth = 0;
    if (depth < tasks_.size()) open(depth);
    std::int64_t n_steps = 0;
    while (depth < tasks_.size()) {
      if (++n_steps > kFitSteps)
        refuse("no room for all tasks was found in " + std::to_string(kFitSteps) + " steps");
      std::vector<std::uint32_t>& options = options_[depth];
      if (options.empty()) {
        if (depth == 0) refuse(kProved);
        --depth;
        const std::uint32_t task = tasks_[depth];
        room_bytes_[processors_[task]] += problem_.memory(task);
        continue;
      }
      const std::uint32_t task = tasks_[depth];
      processors_[task] = options.back();
      options.pop_back();
      room_bytes_[processors_[task]] -= problem_.memory(task);
      if (++depth < tasks_.size()) open(depth);
    }
  }

  void open(std::size_t depth) {
    const std::uint32_t task = tasks_[depth];
    std::vector<std::uint32_t>& options = options_[depth];
    options.clear();
    for (std::uint32_t p = 0; p < problem_.n_processors(); ++p) {
      if (problem_.can_run(task, p) && problem_.memory(task) <= room_bytes_[p] &&
          !(are_alike_ && has_room(options, room_bytes_[p]))) {
        options.push_back(p);
      }
    }
    std::stable_sort(options.begin(), options.end(),
                     [this](std::uint32_t one, std::uint32_t other) {
                       return room_bytes_[one] > room_bytes_[other];
                     });
  }

  // If all processors can run all tasks, those with equal room are equivalent.
  bool has_room(const std::vector<std::uint32_t>& options, std::int64_t bytes) const {
    return std::any_of(options.begin(), options.end(),
                       [&](std::uint32_t one) { return room_bytes_[one] == bytes; });
  }

  [[noreturn]] void refuse(const std::string& why) const {
    std::int64_t bytes = 0;
    for (const std::uint32_t task : tasks_) bytes += problem_.memory(task);
    std::string limits;
    for (std::size_t p = 0; p < problem_.n_processors(); ++p) {
      const std::int64_t limit = problem_.graph().memory_limits_bytes[p];
      limits += (p > 0 ? ", " : "") + (limit == kNoLimit ? "no limit" : std::to_string(limit));
    }
    throw PlanError("memory: " + why + ": they take " + std::to_string(bytes) +
                    " bytes together, the largest " +
                    std::to_string(tasks_.empty() ? 0 : problem_.memory(tasks_.front())) +
                    ", and the limits are " + limits);
  }

  const TaskProblem& problem_;
  Assignment processors_;
  bool are_alike_ = true;
  std::vector<std::int64_t> room_bytes_;
  std::vector<std::uint32_t> tasks_;
  std::vector<std::vector<std::uint32_t>> options_;  // by depth, the best last
};

}  // namespace

Assignment fit_in_memory(const TaskProblem& problem) { return Fitting(problem).run(); }

}  // namespace offload
