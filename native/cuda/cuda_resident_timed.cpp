// Executions of a CudaResident that are timed, as timelines ask.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/cuda_resident.hpp"

namespace offload::cuda {

// A clone of the template with what it is to be given now: no address that has gone is
// instantiated.
void CudaResident::make_timed() {
  const RelaxedCapture relaxed(driver_);
  std::vector<GraphNode> handles;
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    handles.push_back(nodes_[node].parameters->handle());
    if (nodes_[node].may_change) set_template(node);
  }
  std::vector<std::int64_t> launches(nodes_.size(), -1);
  for (std::size_t launch = 0; launch < launch_nodes_.size(); ++launch) {
    for (const std::uint32_t node : launch_nodes_[launch]) {
      launches[node] = static_cast<std::int64_t>(launch);
    }
  }
  const TimedTemplate from{clone_, std::move(handles), std::move(launches), streamed_, copy_nodes_};
  timed_ = std::make_unique<TimedGraph>(driver_, from, *weights_, stream());
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    timed_->note_applied(node, *nodes_[node].parameters);
  }
}

void CudaResident::set_timed() {
  if (timed_ == nullptr) make_timed();
  for (std::uint32_t index = 0; index < nodes_.size(); ++index) {
    Node& node = nodes_[index];
    const bool keeps = node.n_outside > 0 && node.parameters->keeps_allocations();
    if (!keeps && !(node.may_change && timed_->is_changed(index, *node.parameters))) continue;
    ++n_set_params_;
    const Result result = timed_->set(index, *node.parameters, context_.handle());
    if (is_of_other_memory(result, *node.parameters)) {
      forget_timed();
      return make_timed();
    }
    if (result != kSuccess) {
      driver_.fail(result, "re-setting " + node_name(index) + ", a " + node.parameters->describe());
    }
  }
}

// Its last copies may run.
void CudaResident::forget_timed() noexcept {
  if (timed_ == nullptr) return;
  weights_->rest();
  timed_.reset();
  is_timed_pass_ = false;
}

void CudaResident::trace_weights(bool traces) {
  traces_ = traces;
  if (traces || timed_ == nullptr) return;
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  forget_timed();
}

PassReport CudaResident::take_pass() {
  PassReport report = weights_->take_report();
  if (!std::exchange(is_timed_pass_, false)) return report;
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  try {
    timed_->report(report);
  } catch (...) {
    timing_failed_ = true;  // whatever it was that failed
    throw;
  }
  return report;
}

}  // namespace offload::cuda
