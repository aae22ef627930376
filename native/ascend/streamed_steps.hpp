// Copies of streamed weights in a model, ordered with its launches by streams and events.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ascend/ascend_weight_stream.hpp"

namespace offload::acl {

enum class StepKind {
  kNode,    // the model's maker launches the node here
  kCopy,    // a transfer
  kRecord,  // of an event
  kWait,    // for an event recorded before
  kReady,   // outputs are ready: the external event is recorded
};

enum class StepStream { kLaunches, kCopies };

// One action on a stream of the model.
struct Step {
  StepKind kind = StepKind::kNode;
  StepStream stream = StepStream::kLaunches;
  std::size_t index = 0;  // of the node, transfer or event
};

// The steps of a model, in the order of their submission to its streams. Each event is recorded
// once, and waited for once.
//
// Owner: one resident, from before its model is made until after its destruction. Thread: callers
// serialise, with the device's context current. Errors: the constructor throws ExecutionError where
// events cannot be made, and std::invalid_argument unless nodes are numbered in order, each
// transfer occurs once, and each event is waited for once, after its record; before and end throw
// ExecutionError where the runtime fails, and std::logic_error for a node that is not the next.
class StreamedSteps {
 public:
  StreamedSteps(std::shared_ptr<AscendWeightStream> weights, std::vector<Step> steps);
  ~StreamedSteps();
  StreamedSteps(const StreamedSteps&) = delete;
  StreamedSteps& operator=(const StreamedSteps&) = delete;

  const std::shared_ptr<AscendWeightStream>& weights() const { return weights_; }

  // Submits the steps before a node; nodes come in order, each once. `copies`: the lane, or a
  // stream that is bound to the model.
  void before(std::size_t node, Stream launches, Stream copies);

  // Submits the remaining steps. Throws std::logic_error if a node remains.
  void end(Stream launches, Stream copies);

 private:
  void check() const;
  void tell(const Step& step, Stream stream);

  std::shared_ptr<AscendWeightStream> weights_;
  const Runtime& runtime_;
  Device device_;
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<OrderEvent>> events_;
  std::size_t next_ = 0;
};

}  // namespace offload::acl
