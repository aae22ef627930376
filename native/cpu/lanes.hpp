// Executions of a CPU resident on lanes, each of one thread.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/cpu_resident.hpp"
#include "offload/claimed_lanes.hpp"
#include "offload/lane_balance.hpp"

namespace offload {

// What happens to bytes of a slot once all of these launches have ended, in any order.
struct CpuEnding {
  std::size_t slot = 0;
  std::int64_t offset_bytes = 0;
  std::size_t size_bytes = 0;  // that are overwritten; 0: the slot's memory is freed
  std::vector<std::size_t> launches;
};

// Counts of executions on lanes so far.
struct CpuLaneCounts {
  std::uint64_t n_shared = 0;  // executions in which helpers could take part
  std::uint64_t n_alone = 0;   // others: launches in recorded order on the caller's thread
  std::uint64_t n_helped = 0;  // launches run by helpers
};

// Whether helpers take part in executions: where it pays, or always.
enum class CpuSharing : std::uint8_t { kBalanced, kAlways };

// Executes the launches of a resident on lanes. Each launch runs on one thread, so its results have
// the bits of one thread, whichever thread runs it. The first execution proves launches in recorded
// order; executions in which helpers would not pay also run in that order.
//
// Owner: its resident. Thread: as the resident. Errors: as Resident::execute; of failed launches
// the first in recorded order.
class CpuLanes final : public LaneWork {
 public:
  // Throws std::out_of_range for an unknown launch or slot, and std::invalid_argument unless each
  // launch occurs once, in order on its lane.
  CpuLanes(CpuResident& resident, std::vector<std::vector<LaneStep>> lanes,
           std::vector<CpuEnding> endings);

  void execute(Submission& submission, LaunchTimes* times);

  void share(CpuSharing sharing) { sharing_ = sharing; }
  CpuLaneCounts counts() const;

  void run(std::size_t lane, std::size_t& launch, std::size_t last,
           const std::atomic<bool>& stopped) override;
  void take_part(const std::function<void()>& drive) override;

 private:
  struct Left {
    std::atomic<std::size_t> n_launches = 0;
  };
  // The state of a lane, whichever thread runs it.
  struct Own {
    std::vector<c10::IValue> stack;
    std::uint64_t clock_reads = 0;
  };

  void execute_shared(LaunchTimes* times);
  void end_of(std::size_t launch) noexcept;

  CpuResident& resident_;
  std::shared_ptr<ClaimedLanes> claimed_;  // null: there is one lane
  std::vector<Own> own_;
  std::vector<CpuEnding> endings_;
  std::vector<std::vector<std::size_t>> endings_of_;  // by launch
  std::unique_ptr<Left[]> left_;                      // by ending
  LaneBalance balance_;
  CpuSharing sharing_ = CpuSharing::kBalanced;
  std::atomic<std::uint64_t> n_shared_ = 0;
  std::atomic<std::uint64_t> n_alone_ = 0;
  // Of the running execution.
  std::optional<at::ThreadLocalState> state_;  // of the caller
  std::fenv_t floating_point_{};               // likewise: its rounding and flushing modes
  LaunchTimes* times_ = nullptr;
};

}  // namespace offload
