#include "ascend/streamed_steps.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace offload::acl {
namespace {

// The indices of the steps of a kind, in the order of the steps.
std::vector<std::size_t> indices_of(const std::vector<Step>& steps, StepKind kind) {
  std::vector<std::size_t> found;
  for (const Step& step : steps) {
    if (step.kind == kind) found.push_back(step.index);
  }
  return found;
}

bool is_each_once(std::vector<std::size_t> indices, std::size_t n) {
  std::sort(indices.begin(), indices.end());
  for (std::size_t index = 0; index < indices.size(); ++index) {
    if (indices[index] != index) return false;
  }
  return indices.size() == n;
}

}  // namespace

StreamedSteps::StreamedSteps(std::shared_ptr<AscendWeightStream> weights, std::vector<Step> steps)
    : weights_(std::move(weights)),
      runtime_(Runtime::get()),
      device_(runtime_, weights_->device()),
      steps_(std::move(steps)) {
  check();
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  for (std::size_t n = indices_of(steps_, StepKind::kRecord).size(); n > 0; --n) {
    events_.push_back(std::make_unique<OrderEvent>(runtime_));
  }
}

StreamedSteps::~StreamedSteps() {
  const ContextScope scope(runtime_, device_);
  events_.clear();
}

void StreamedSteps::check() const {
  const std::vector<std::size_t> nodes = indices_of(steps_, StepKind::kNode);
  const std::vector<std::size_t> records = indices_of(steps_, StepKind::kRecord);
  const bool in_order = std::is_sorted(nodes.begin(), nodes.end());
  if (!in_order || !is_each_once(nodes, nodes.size()) ||
      !is_each_once(indices_of(steps_, StepKind::kCopy), weights_->copies().size()) ||
      !is_each_once(records, records.size()) ||
      !is_each_once(indices_of(steps_, StepKind::kWait), records.size())) {
    throw std::invalid_argument(
        "expected nodes in order, each transfer once, and each event recorded and waited for once");
  }
  std::vector<bool> is_recorded(records.size());
  for (const Step& step : steps_) {
    if (step.kind == StepKind::kRecord) is_recorded[step.index] = true;
    if (step.kind == StepKind::kWait && !is_recorded[step.index]) {
      throw std::invalid_argument("event " + std::to_string(step.index) +
                                  " is waited for before it is recorded");
    }
  }
}

void StreamedSteps::before(std::size_t node, Stream launches, Stream copies) {
  for (; next_ < steps_.size(); ++next_) {
    const Step& step = steps_[next_];
    if (step.kind == StepKind::kNode) break;
    tell(step, step.stream == StepStream::kLaunches ? launches : copies);
  }
  if (next_ == steps_.size() || steps_[next_].index != node) {
    throw std::logic_error("node " + std::to_string(node) + " is not the next of the model");
  }
  ++next_;
}

void StreamedSteps::end(Stream launches, Stream copies) {
  for (; next_ < steps_.size(); ++next_) {
    const Step& step = steps_[next_];
    tell(step, step.stream == StepStream::kLaunches ? launches : copies);
  }
}

void StreamedSteps::tell(const Step& step, Stream stream) {
  switch (step.kind) {
    case StepKind::kNode:
      throw std::logic_error("node " + std::to_string(step.index) + " was not launched");
    case StepKind::kCopy:
      weights_->capture_copy(step.index, stream);
      return;
    case StepKind::kRecord:
      runtime_.check(runtime_.record_event(events_[step.index]->handle(), stream),
                     "ordering launches and copies of weights");
      return;
    case StepKind::kWait:
      runtime_.check(runtime_.wait_event(stream, events_[step.index]->handle()),
                     "ordering launches and copies of weights");
      return;
    case StepKind::kReady:
      if (weights_->ready() == nullptr) return;  // the caller waits for the end of the model
      runtime_.check(runtime_.record_event(weights_->ready(), stream),
                     "recording that the outputs are ready");
  }
}

}  // namespace offload::acl
