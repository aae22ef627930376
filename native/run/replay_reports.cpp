// Reports of a Replay's executions: the last one, proofs, and those that a timeline records.
#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "offload/errors.hpp"
#include "run/replay.hpp"

namespace offload {

// On a device that queues work the time of a launch is unknown, except that it was delivered
// before.
void Replay::note_delivery(ExecutionTrace& trace) const {
  trace.launches.begin_ns = has_streams() ? trace.issues.end_ns : trace.issues.begin_ns;
  trace.launches.end_ns = trace.issues.end_ns;
}

void Replay::note_proof(LastExecution& execution) {
  execution.proof = resident_->proof();
  has_run_ = true;
  const std::lock_guard lock(last_mutex_);
  proof_ = execution.proof;
}

// A launch that waited for weights began when they had arrived. Transfers are cut to the execution,
// as the worker continues between executions.
void Replay::note_weights(LastExecution& execution, ExecutionTrace* trace) {
  PassReport report = weight_passes_->take_pass();
  execution.bytes_streamed = report.bytes;
  execution.pass_ns = report.device_ns;
  if (report.is_timed) {
    execution.stream_timed_bytes = report.bytes - report.untimed_bytes;
    execution.stream_busy_ns = report.busy_ns;
    execution.stream_wait_ns = report.wait_ns;
    if (!execution.pass_ns) execution.pass_ns = execution.device_ns();
  }
  if (trace == nullptr) return;
  if (report.is_timed) execution.stream_waits = report.waits;
  if (report.device_ns) ++trace->clock_reads;  // to map that to the host's clock
  for (const WeightWait& wait : report.waits) {
    std::uint64_t& begin_ns = trace->launches.begin_ns[wait.launch];
    std::uint64_t& end_ns = trace->launches.end_ns[wait.launch];
    begin_ns = std::max(begin_ns, wait.end_ns);
    end_ns = std::max(end_ns, begin_ns);
  }
  trace->weight_waits = std::move(report.waits);
  for (TransferTime& one : report.transfers) {
    if (one.end_ns <= execution.begin_ns) continue;
    one.begin_ns = std::max(one.begin_ns, execution.begin_ns);
    trace->weight_transfers.push_back(std::move(one));
  }
}

void Replay::keep(const LastExecution& execution, std::optional<ExecutionTrace> trace) {
  const std::lock_guard lock(last_mutex_);
  const std::uint64_t n_executions = last_.n_executions + 1;
  last_ = execution;
  last_.n_executions = n_executions;
  if (!trace || !traces_) return;
  trace->execution = last_;
  if (last_.pass_ns) last_traced_ = last_;
  trace_clock_reads_ += trace->clock_reads + trace->launches.clock_reads +
                        trace->issues.clock_reads + 2 * trace->transfers.size();
  traces_->push_back(std::move(*trace));
}

void Replay::start_trace() {
  const std::lock_guard lock(last_mutex_);
  if (traces_) throw ExecutionError("a timeline of this executable is being recorded already");
  traces_.emplace();
}

bool Replay::is_tracing() const {
  const std::lock_guard lock(last_mutex_);
  return traces_.has_value();
}

std::vector<ExecutionTrace> Replay::stop_trace() {
  std::vector<ExecutionTrace> traces;
  {
    const std::lock_guard lock(last_mutex_);
    traces = std::move(*traces_);
    traces_.reset();
  }
  if (weight_passes_ == nullptr) return traces;
  // Ends tracing now or, if an execution is running, before the next execution.
  const std::unique_lock lock(turn_->lane.execution_mutex(), std::try_to_lock);
  if (lock.owns_lock() && !turn_->running && !released_) weight_passes_->trace_weights(false);
  return traces;
}

LastExecution Replay::last_execution() const {
  const std::lock_guard lock(last_mutex_);
  return last_;
}

std::optional<Proof> Replay::proof() const {
  const std::lock_guard lock(last_mutex_);
  return proof_;
}

LastExecution Replay::last_traced() const {
  const std::lock_guard lock(last_mutex_);
  return last_traced_;
}

}  // namespace offload
