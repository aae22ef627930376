// Steps: the actions of an execution, lane by lane, and how long lanes take for them.
#pragma once

#include <cstdint>
#include <vector>

namespace offload {

enum class StepKind : std::int64_t {
  kRun,     // launches from `first` up to but excluding `second`
  kCopy,    // piece `first`, for the execution `second` later: 0 or 1
  kRecord,  // event `first`
  kWait,    // for event `first`, as recorded by the execution `second` earlier: 0 or 1
};

struct LaneStep {
  StepKind kind;
  std::int64_t first;
  std::int64_t second;
};

using LaneSteps = std::vector<LaneStep>;

// An execution in the steady state. Times count from the end of the last launch of the execution
// before, so that copies made ahead may begin before zero.
struct SimulatedSteps {
  double period_ns = 0;
  std::vector<double> launch_begin_ns;  // by launch
  std::vector<double> launch_end_ns;
  std::vector<double> copy_begin_ns;  // of each copy that its launches use, lane by lane, in order
  std::vector<double> copy_end_ns;
};

// Simulates consecutive executions until two periods in a row agree: at least three, at most
// sixteen. Each lane performs its steps in order, after those of the execution before. What is
// copied ahead is available to the first execution once its lane has copied it.
//
// `launch_ns` by launch, `copy_ns` by piece. Thread: any; nothing is shared. Errors: PlanError if a
// step names a launch, piece, event or age that does not exist, a launch is run twice, or lanes
// wait for one another.
SimulatedSteps simulate_steps(const std::vector<LaneSteps>& lanes,
                              const std::vector<double>& launch_ns,
                              const std::vector<double>& copy_ns);

}  // namespace offload
