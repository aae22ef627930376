// Timing of a CudaResident: executions for timelines, launches, and copies of nodes.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/cuda_resident.hpp"
#include "cuda/launch_times.hpp"
#include "offload/errors.hpp"

namespace offload::cuda {

// A clone of the template with the current images: no stale address is instantiated.
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

// Its last copies may still run.
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
    timing_failed_ = true;  // whatever has failed
    throw;
  }
  return report;
}

std::vector<double> CudaResident::time_launches() {
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  prepare();
  if (weights_) throw ExecutionError("launches are timed where no weight is streamed");
  set_templates();
  std::vector<std::vector<GraphNode>> launches;
  for (const std::vector<std::uint32_t>& nodes : launch_nodes_) {
    launches.emplace_back();
    for (const std::uint32_t node : nodes) {
      launches.back().push_back(nodes_[node].parameters->handle());
    }
  }
  arena_->enter(stream());
  return cuda::time_launches(driver_, clone_, launches);
}

CopySamples CudaResident::sample_copy_costs() const {
  refuse_closed();
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  for (const Word& word : words_) {
    if (word.is_half) continue;
    const ResidentNode& node = *nodes_[word.node].parameters;
    const std::optional<std::size_t> offset_bytes = node.argument_offset(word.bytes);
    if (!offset_bytes) continue;
    return cuda::sample_copy_costs(driver_, context_.handle(), node.handle(), *offset_bytes);
  }
  throw ExecutionError("no kernel of the program holds an address: there is nothing to measure");
}

}  // namespace offload::cuda
