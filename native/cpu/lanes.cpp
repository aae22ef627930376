#include "cpu/lanes.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "run/operator_threads.hpp"

namespace offload {
namespace {

// Unlikely as a result, not a neutral element, and a NaN in every floating-point format.
constexpr unsigned char kFill = 0xFD;

const std::vector<std::size_t> kNothing;  // is released: `end_of` releases

// Each occurs once, and in order on its lane.
void check_launches(const std::vector<std::vector<LaneStep>>& lanes, std::size_t n_launches) {
  std::vector<bool> found(n_launches);
  for (const std::vector<LaneStep>& lane : lanes) {
    std::size_t next = 0;
    for (const LaneStep& step : lane) {
      if (step.kind != LaneStep::Kind::kRun) continue;
      if (step.first < next) throw std::invalid_argument("a lane's launches are in no order");
      for (next = step.first; next < step.last; ++next) {
        if (found.at(next)) throw std::invalid_argument("a launch is run twice");
        found[next] = true;
      }
    }
  }
  if (std::find(found.begin(), found.end(), false) != found.end()) {
    throw std::invalid_argument("a launch is on no lane");
  }
}

}  // namespace

CpuLanes::CpuLanes(CpuResident& resident, std::vector<std::vector<LaneStep>> lanes,
                   std::vector<CpuEnding> endings)
    : resident_(resident),
      own_(lanes.size()),
      endings_(std::move(endings)),
      endings_of_(resident.n_launches()),
      left_(std::make_unique<Left[]>(endings_.size())) {
  check_launches(lanes, resident.n_launches());
  for (std::size_t index = 0; index < endings_.size(); ++index) {
    static_cast<void>(resident_.slots_.at(endings_[index].slot));
    for (const std::size_t launch : endings_[index].launches) {
      endings_of_.at(launch).push_back(index);
    }
  }
  if (lanes.size() > 1)
    claimed_ = std::make_shared<ClaimedLanes>(*this, std::move(lanes),
                                              static_cast<const Resident*>(&resident));
}

CpuLaneCounts CpuLanes::counts() const {
  return {n_shared_, n_alone_, claimed_ ? claimed_->n_helped() : 0};
}

void CpuLanes::execute(Submission& submission, LaunchTimes* times) {
  const OperatorThreads one_thread(1);
  if (!claimed_ || !resident_.proved_) {
    ++n_alone_;
    resident_.execute_in_order(submission, times);
    return;
  }
  const std::size_t n_helpers = claimed_->n_lanes() - 1;
  const std::uint64_t begin_ns = now_ns();
  const bool is_shared = balance_.is_shared(Helpers::instance().are_looking(n_helpers), begin_ns) ||
                         sharing_ == CpuSharing::kAlways;
  if (is_shared) {
    submission.end_ns = now_ns();
    ++n_shared_;
    execute_shared(times);
  } else {
    ++n_alone_;
    resident_.execute_in_order(submission, times);
  }
  balance_.ended(is_shared, begin_ns, now_ns());
}

void CpuLanes::execute_shared(LaunchTimes* times) {
  times_ = times;
  for (std::size_t index = 0; index < endings_.size(); ++index) {
    left_[index].n_launches.store(endings_[index].launches.size(), std::memory_order_relaxed);
  }
  state_.emplace();
  std::fegetenv(&floating_point_);
  try {
    claimed_->execute(claimed_->n_lanes() - 1);
  } catch (...) {
    for (Own& own : own_) own = {};
    state_.reset();
    resident_.give_up();
    throw;
  }
  state_.reset();
  if (times == nullptr) return;
  for (Own& own : own_) times->clock_reads += std::exchange(own.clock_reads, 0);
}

void CpuLanes::run(std::size_t lane, std::size_t& launch, std::size_t last,
                   const std::atomic<bool>& stopped) {
  Own& own = own_[lane];
  std::uint64_t begin_ns = times_ == nullptr ? 0 : now_ns();
  own.clock_reads += times_ != nullptr;
  for (; launch < last && !stopped; ++launch) {
    CpuLaunch& one = resident_.launches_[launch];
    try {
      resident_.run(one, own.stack, kNothing);
    } catch (...) {
      CpuResident::tell(one);
    }
    end_of(launch);
    if (times_ == nullptr) continue;
    times_->begin_ns[launch] = begin_ns;
    begin_ns = now_ns();
    times_->end_ns[launch] = begin_ns;
    ++own.clock_reads;
  }
}

void CpuLanes::end_of(std::size_t launch) noexcept {
  for (const std::size_t index : endings_of_[launch]) {
    if (left_[index].n_launches.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    const CpuEnding& ending = endings_[index];
    if (ending.size_bytes == 0) {
      resident_.release(ending.slot);
    } else {
      auto* const base = static_cast<unsigned char*>(
          resident_.storages_[ending.slot].unsafeGetStorageImpl()->mutable_data());
      std::memset(base + ending.offset_bytes, kFill, ending.size_bytes);
    }
  }
}

// In the caller's KernelScope, which is part of its state, and as one thread of operators.
void CpuLanes::take_part(const std::function<void()>& drive) {
  const at::ThreadLocalStateGuard state(*state_);
  std::fenv_t before;
  std::fegetenv(&before);
  std::fesetenv(&floating_point_);
  {
    const OperatorThreads one_thread(1);
    drive();
  }
  std::fesetenv(&before);
}

}  // namespace offload
