// Replay: drives one resident program, execution by execution.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "offload/header.hpp"
#include "offload/lane.hpp"
#include "offload/resident.hpp"
#include "replay/call.hpp"

namespace offload {

// What one execution did. Times in ns; m_l_t is the sum of the first four.
struct LastExecution {
  std::uint64_t convert_ns = 0;  // arguments checked, outputs allocated, addresses bound
  std::uint64_t policy_ns = 0;   // what changed
  std::uint64_t patch_ns = 0;    // words written
  std::uint64_t submit_ns = 0;   // until the first launch begins
  std::uint64_t device_ns = 0;   // the launches
  HeaderCounts counts;
  std::uint64_t bytes_copied = 0;
  std::uint64_t n_executions = 0;  // of this executable so far, this one included
};

// One executable: its resident program, header, arena and lane.
//
// Owner: shared by the caller and every execution in flight. Thread: any may call; executions run
// one at a time, submitted ones in order and before later synchronous ones. No method needs or
// takes the GIL; callers release it around execute, wait and close. Errors: as Resident;
// BindingError for weights whose storage was swapped; ExecutionError after close.
class Replay : public std::enable_shared_from_this<Replay> {
 public:
  Replay(CallSpec spec, std::vector<Trigger> triggers, std::shared_ptr<Resident> resident);

  const CallSpec& spec() const { return spec_; }
  Resident& resident() { return *resident_; }

  // Executes on this thread, or on the lane where submitted work is still ahead.
  void execute(const std::shared_ptr<Call>& call);

  // Executes on the lane; the ticket ends with it.
  std::shared_ptr<Ticket> submit(const std::shared_ptr<Call>& call);

  // Takes the storages that the weights' tensors have now.
  void rebind_weights();

  LastExecution last_execution() const;

  // Waits for what is in flight; later executions fail.
  void close() noexcept;
  bool closed() const { return closed_; }

 private:
  void run(Call& call);
  void check_weights() const;
  void bind(const Call& call);
  std::uint64_t feature_map_address(const Call& call);

  CallSpec spec_;
  std::shared_ptr<Resident> resident_;
  Header header_;
  c10::DataPtr arena_;
  std::atomic<bool> closed_ = false;  // nothing new is taken
  bool running_ = false;              // under the execution mutex
  bool released_ = false;             // and nothing taken before is left
  std::mutex close_mutex_;
  mutable std::mutex last_mutex_;
  LastExecution last_;
  Lane lane_;  // last, so that its thread ends before anything that it uses
};

}  // namespace offload
