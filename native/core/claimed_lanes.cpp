#include "offload/claimed_lanes.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <new>
#include <stdexcept>

#include "offload/errors.hpp"
#include "offload/lane.hpp"

namespace offload {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// The state of a lane, in the low bits of a claim below the number of the execution.
constexpr std::uint64_t kFree = 0;
constexpr std::uint64_t kTaken = 1;
constexpr std::uint64_t kEnded = 2;
std::uint64_t claim_of(std::uint64_t execution, std::uint64_t state) {
  return execution * 4 + state;
}

// Longer spinning would cost other threads more than a sleep and a wake-up.
constexpr auto kSpinFor = std::chrono::microseconds(50);
constexpr int kRestsBetweenYields = 64;

thread_local const void* helped = nullptr;

// Renumbers events from 0 without gaps and returns their number.
std::size_t number_events(std::vector<std::vector<LaneStep>>& lanes) {
  std::map<std::size_t, std::pair<std::size_t, std::size_t>> found;  // its number and lane
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    for (LaneStep& step : lanes[lane]) {
      if (step.kind != LaneStep::Kind::kRecord) continue;
      const auto [place, is_new] = found.emplace(step.first, std::pair(found.size(), lane));
      if (!is_new) throw std::invalid_argument("an event is recorded twice");
      step.first = place->second.first;
    }
  }
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    for (LaneStep& step : lanes[lane]) {
      if (step.kind != LaneStep::Kind::kWait) continue;
      const auto place = found.find(step.first);
      if (place == found.end() || place->second.second == lane) {
        throw std::invalid_argument("a lane waits for an event that no other lane records");
      }
      step.first = place->second.first;
    }
  }
  return found.size();
}

}  // namespace

ClaimedLanes::ClaimedLanes(LaneWork& work, std::vector<std::vector<LaneStep>> lanes, const void* of)
    : work_(work), of_(of), steps_(std::move(lanes)) {
  if (steps_.empty()) throw std::invalid_argument("there are no lanes");
  const std::size_t n_events = number_events(steps_);
  lanes_ = std::make_unique<Lane[]>(steps_.size());
  events_ = std::make_unique<Event[]>(n_events);
  Helpers::instance().add(*this);
}

ClaimedLanes::~ClaimedLanes() { Helpers::instance().remove(*this); }

bool ClaimedLanes::is_helping_with(const void* of) noexcept {
  return helped != nullptr && helped == of;
}

void ClaimedLanes::execute(std::size_t n_helpers) {
  begin();
  const std::uint64_t execution = execution_;
  n_helpers = std::min(n_helpers, n_lanes() - 1);
  if (n_helpers > 0) Helpers::instance().offer(shared_from_this(), n_helpers);
  drive(execution, 0, /*helps=*/false);
  if (n_helpers > 0) Helpers::instance().withdraw(*this);
  if (stopped_) rethrow_first();
}

// No other thread takes part yet: a late helper claims no lane of an execution that has ended.
void ClaimedLanes::begin() {
  const std::uint64_t execution = execution_ + 1;
  n_ended_ = 0;
  stopped_ = false;
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    Lane& lane = lanes_[index];
    lane.at = 0;
    lane.awaited = 0;
    lane.error = nullptr;
    lane.owner = std::this_thread::get_id();
  }
  execution_ = execution;
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    lanes_[index].claim = claim_of(execution, index == 0 ? kTaken : kFree);
  }
}

void ClaimedLanes::help() noexcept {
  const std::uint64_t execution = execution_;
  std::size_t mine = kNone;
  while ((mine = take_ready(execution)) == kNone) {
    if (is_over(execution)) return;
    wait_until([&] { return is_one_ready(execution) || is_over(execution); });
  }
  // From here on the execution cannot end before this lane does.
  helped = of_;
  const Executing executing;
  bool has_begun = false;
  try {
    work_.take_part([&] {
      has_begun = true;
      drive(execution, mine, /*helps=*/true);
    });
  } catch (...) {
    if (!has_begun) give_back(mine, execution);  // the thread lacks memory for what it needs
  }
  helped = nullptr;
}

// Returns once all lanes have ended.
void ClaimedLanes::drive(std::uint64_t execution, std::size_t mine, bool helps) {
  while (true) {
    if (mine != kNone && go_on(mine, execution, helps)) {
      end(mine, execution);
      mine = kNone;
    }
    const std::size_t other = take_ready(execution);
    if (other != kNone) {
      if (mine != kNone) give_back(mine, execution);
      mine = other;
      continue;
    }
    if (mine == kNone && is_over(execution)) return;
    wait_until([&] {
      if (mine == kNone && is_over(execution)) return true;
      return (mine != kNone && can_go_on(lanes_[mine], execution)) || is_one_ready(execution);
    });
  }
}

// Executes the steps of a claimed lane. Returns false where it must wait for an event.
bool ClaimedLanes::go_on(std::size_t index, std::uint64_t execution, bool helps) {
  Lane& lane = lanes_[index];
  const std::vector<LaneStep>& steps = steps_[index];
  for (; lane.at < steps.size() && !stopped_; ++lane.at) {
    const LaneStep& step = steps[lane.at];
    if (step.kind == LaneStep::Kind::kRecord) {
      events_[step.first].execution = execution;
      signal();
    } else if (step.kind == LaneStep::Kind::kWait) {
      if (is_recorded(step.first, execution)) continue;
      lane.awaited = step.first + 1;
      return false;
    } else {
      std::size_t launch = step.first;
      try {
        work_.run(index, launch, step.last, stopped_);
      } catch (...) {
        lane.error = std::current_exception();
        lane.failed = launch;
        stopped_ = true;
      }
      if (helps) n_helped_.fetch_add(launch - step.first, std::memory_order_relaxed);
    }
  }
  return true;
}

void ClaimedLanes::end(std::size_t lane, std::uint64_t execution) {
  lanes_[lane].claim = claim_of(execution, kEnded);
  ++n_ended_;  // the caller may return from here on
  signal();
}

void ClaimedLanes::give_back(std::size_t lane, std::uint64_t execution) {
  lanes_[lane].claim = claim_of(execution, kFree);
  signal();
}

bool ClaimedLanes::can_go_on(const Lane& lane, std::uint64_t execution) const {
  const std::size_t awaited = lane.awaited;
  return awaited == 0 || stopped_ || is_recorded(awaited - 1, execution);
}

bool ClaimedLanes::is_one_ready(std::uint64_t execution) const {
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    const Lane& lane = lanes_[index];
    if (lane.claim == claim_of(execution, kFree) && can_go_on(lane, execution)) return true;
  }
  return false;
}

std::size_t ClaimedLanes::take_ready(std::uint64_t execution) {
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    Lane& lane = lanes_[index];
    std::uint64_t expected = claim_of(execution, kFree);
    if (lane.claim != expected || !can_go_on(lane, execution)) continue;
    if (!lane.claim.compare_exchange_strong(expected, claim_of(execution, kTaken))) continue;
    lane.owner = std::this_thread::get_id();
    return index;
  }
  return kNone;
}

bool ClaimedLanes::is_over(std::uint64_t execution) const {
  return n_ended_ == n_lanes() || execution_ != execution;
}

template <typename Ready>
void ClaimedLanes::wait_until(Ready ready) {
  const auto until = std::chrono::steady_clock::now() + kSpinFor;
  for (int n_rests = 1;; ++n_rests) {
    if (ready()) return;
    rest();
    if (n_rests % kRestsBetweenYields != 0) continue;
    if (std::chrono::steady_clock::now() >= until) break;
    std::this_thread::yield();
  }
  std::unique_lock lock(mutex_);
  ++n_sleeping_;
  changed_.wait(lock, ready);
  --n_sleeping_;
}

// Called after each change that a thread may wait for. Either this thread sees the sleeping thread,
// or the sleeping thread has seen the change: all accesses are sequentially consistent.
void ClaimedLanes::signal() {
  if (n_sleeping_ == 0) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void ClaimedLanes::rethrow_first() {
  Lane* first = nullptr;
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    Lane& lane = lanes_[index];
    if (lane.error && (first == nullptr || lane.failed < first->failed)) first = &lane;
  }
  const std::exception_ptr error = std::move(first->error);
  for (std::size_t index = 0; index < n_lanes(); ++index) lanes_[index].error = nullptr;
  std::rethrow_exception(error);
}

// The forking thread is the only thread, and continues with the lane that it has claimed.
void ClaimedLanes::abandon() noexcept {
  new (&mutex_) std::mutex();
  new (&changed_) std::condition_variable();
  n_sleeping_ = 0;
  const std::uint64_t execution = execution_;
  if (execution == 0 || is_over(execution)) return;
  for (std::size_t index = 0; index < n_lanes(); ++index) {
    Lane& lane = lanes_[index];
    const bool is_mine = lane.owner == std::this_thread::get_id();
    if (lane.claim != claim_of(execution, kTaken) || is_mine) continue;
    lane.failed = kNone;
    lane.error = std::make_exception_ptr(ExecutionError(
        "the process was forked while this execution was under way: execute it again here"));
    stopped_ = true;
    lane.claim = claim_of(execution, kEnded);
    ++n_ended_;
  }
}

}  // namespace offload
