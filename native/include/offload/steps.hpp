// Steps: what an execution consists of, lane by lane, and how long lanes take for them.
#pragma once

#include <cstdint>
#include <vector>

namespace offload {

enum class StepKind : std::int64_t {
  kRun,     // launches from `first` up to and without `second`
  kCopy,    // the piece `first`, for the execution that is `second` later: 0 or 1
  kRecord,  // the event `first`
  kWait,    // for the event `first`, as the execution recorded it that is `second` older: 0 or 1
};

struct LaneStep {
  StepKind kind;
  std::int64_t first;
  std::int64_t second;
};

using LaneSteps = std::vector<LaneStep>;

// An execution once the first ones are over. Times count from the end of the last launch of the
// execution before, so that what was copied ahead may begin before zero.
struct SimulatedSteps {
  double period_ns = 0;
  std::vector<double> launch_begin_ns;  // by launch
  std::vector<double> launch_end_ns;
  std::vector<double> copy_begin_ns;  // of each copy that its launches use, lane by lane, in order
  std::vector<double> copy_end_ns;
};

// Runs executions one after the other, until two periods in a row agree: three at least, sixteen
// at most. Each lane carries out its steps in order, an execution's behind those of the one before.
// What is copied ahead is there for the first execution once its lane has copied it.
//
// `launch_ns` by launch, `copy_ns` by piece. Thread: any; nothing is shared. Errors: PlanError if a
// step names a launch, piece, event or age that there is not, a launch is run twice, or lanes wait
// for one another.
SimulatedSteps simulate_steps(const std::vector<LaneSteps>& lanes,
                              const std::vector<double>& launch_ns,
                              const std::vector<double>& copy_ns);

}  // namespace offload
