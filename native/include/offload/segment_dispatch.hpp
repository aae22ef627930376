// The dispatch of ready segments to devices while executions are under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "offload/segment_prediction.hpp"

namespace offload {

// What is to be done now.
struct DispatchCommand {
  enum class Kind : std::int64_t {
    kBegin,  // the segment on the device, which is idle and has all that the segment reads
    kCopy,   // values of the producer to a memory
    kEnd,    // nothing is left of the execution
  } kind;
  std::int64_t execution;
  std::int64_t what;  // a segment, or the producer of values; 0
  std::int64_t to;    // a device, or a memory; 0
  std::vector<std::int64_t> values;
};

// Decides which segment a device begins next. A device has one segment at a time; one that waits
// for a device has not begun, and is given to another device where the execution then ends earlier
// by the prediction: so an idle device takes work from a busy or late one.
//
// An execution has a plan, a device for each segment. The plan is replaced, as far as segments have
// not begun, when paces have changed by a twentieth, or when a segment is ready whose device is
// busy while another device is idle. Changed paces lead to a new plan at most once in 20 times what
// planning takes, so that short segments do not cost a plan each. Candidates are the plan, the
// earliest ends from now on, and the rest on one device. A segment that takes longer than expected
// counts as lasting as long again as it is late. Values are copied when their producer has ended,
// to where the plan has their readers.
//
// A step looks at the earliest executions alone, so its duration does not grow with what is queued.
// The same events at the same times give the same commands.
//
// Owner: one caller. Thread: one at a time. Errors: PlanError for an unknown execution, an event
// that cannot be, and as SegmentPrediction.
class SegmentDispatch {
 public:
  explicit SegmentDispatch(SegmentGraph graph, ChoiceObjective objective);

  // Adds an execution with its plan; returns its number.
  std::int64_t add(std::vector<std::int64_t> devices);
  // Events. The end of what has begun must be noted for abandoned executions as well.
  void segment_ended(std::int64_t execution, std::int64_t segment);
  void copy_ended(std::int64_t execution, std::int64_t to, const std::vector<std::int64_t>& values);
  // Begins nothing more of an execution: it has failed.
  void abandon(std::int64_t execution);

  // What is to be done at this time, with these paces.
  std::vector<DispatchCommand> next(const std::vector<double>& paces, double now_ns);

  // When `next` is to be called even if nothing happens: a device that is late may lose a segment
  // that waits for it. Infinite: never.
  double wake_at_ns() const { return wake_at_ns_; }
  // The segments that were given to another device than planned when their execution was added.
  std::int64_t n_moved() const { return n_moved_; }
  // The plan of an execution.
  const std::vector<std::int64_t>& devices(std::int64_t execution);

 private:
  enum class State : std::uint8_t { kWaiting, kRunning, kEnded };

  struct Execution {
    std::int64_t number = 0;
    std::vector<std::int64_t> devices;
    std::vector<State> states;        // by segment
    std::vector<std::size_t> n_left;  // by segment, those that it waits for
    std::vector<double> there_ns;     // by value * n_memories + memory: expected; 0: it is there
    std::vector<double> paces;        // at the latest plan
    std::size_t n_waiting = 0, n_open = 0;  // segments; segments and copies under way
    bool may_copy = true;                   // a producer has ended or the plan has changed
    bool is_abandoned = false;
  };

  // What a device does. An idle one has no execution.
  struct Running {
    std::int64_t execution = kNothing, segment = 0;
    double begin_ns = 0;
  };
  static constexpr std::int64_t kNothing = -1;

  Execution& find(std::int64_t execution);
  bool is_idle(std::size_t device) const { return running_[device].execution == kNothing; }
  double cost_ns(std::int64_t segment, std::size_t device) const;
  double left_ns(std::size_t device) const;
  bool is_ready(const Execution& one, std::size_t segment) const;
  void consider();
  void copy(Execution& one);
  void copy_made(Execution& one, std::int64_t producer);
  bool is_wanted(const Execution& one, std::uint32_t value, std::size_t to) const;
  void begin(Execution& one);
  void end();
  void carry_out();
  bool revise(Execution& one);
  void revise_for_idle();
  bool is_better_elsewhere(const Execution& one, std::size_t segment);
  DeviceLoads loads_for(const Execution& one) const;
  SegmentProgress progress_of(const Execution& one) const;

  SegmentPrediction prediction_;
  ChoiceObjective objective_;
  std::deque<Execution> executions_;  // in order
  std::size_t n_considered_ = 0;      // of them, the first, in the present step
  std::vector<Running> running_;      // by device
  std::vector<double> link_free_ns_;  // from memory * n_memories + to memory: expected
  std::vector<double> paces_;
  double now_ns_ = 0;
  double plan_again_ns_ = -std::numeric_limits<double>::infinity();  // for changed paces
  double wake_at_ns_ = std::numeric_limits<double>::infinity();
  std::int64_t n_added_ = 0, n_moved_ = 0;
  std::vector<DispatchCommand> commands_;
};

}  // namespace offload
