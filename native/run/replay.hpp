// Replay: drives one resident program, execution by execution.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "offload/header.hpp"
#include "offload/resident.hpp"
#include "run/call.hpp"
#include "run/dependencies.hpp"
#include "run/execution.hpp"
#include "run/held_call.hpp"
#include "run/host_scheduler.hpp"
#include "run/instances.hpp"
#include "run/turn.hpp"
#include "run/weights.hpp"

namespace offload {

// One executable: its resident program, header, arena and lane.
//
// Owner: shared by the caller and every execution in flight. Thread: any may call; executions run
// one at a time, submitted ones in order and before later synchronous ones, also those of joined
// replays. Where the device queues work, an execution is enqueued while earlier ones are under way.
// No method needs or takes the GIL; callers release it around execute, waits and close. Errors: as
// Resident; BindingError for weights whose storage was swapped; ExecutionError after close.
class Replay : public std::enable_shared_from_this<Replay> {
 public:
  // `host_scheduled`: deliver the program launch by launch instead of as one task.
  Replay(CallSpec spec, std::vector<Trigger> triggers, std::shared_ptr<Resident> resident,
         bool host_scheduled);

  // Closes: memory that executions in flight read must outlive them.
  ~Replay() { close(); }

  const CallSpec& spec() const { return spec_; }

  // Whether the resident has streams: then each call names the stream on which it executes, execute
  // returns once the work is enqueued, and a ticket is done when the device is.
  bool has_streams() const { return streams_ != nullptr; }

  // Whether calls must provide the driver's handle of that stream.
  bool needs_stream_handle() const { return !streams_->follows_torch(); }

  // Whether the resident's kernels read the states of generators, which each call must then
  // provide.
  bool has_generators() const { return generators_ != nullptr; }
  Resident& resident() { return *resident_; }

  // From now on executes in turn with another one, whose lanes and arena it shares, and which is to
  // be closed first. On a device with streams executions of both follow one another on the device,
  // too. Nobody else may have this one yet, and nothing of it may be in flight.
  void join(const Replay& other);

  // Executes on this thread, or on the lane if submitted work is queued before it.
  void execute(const std::shared_ptr<Call>& call);

  // Executes on the lane, which first waits for what the call depends on; then ends the ticket. May
  // be called by a ticket's callback.
  void submit(const std::shared_ptr<Call>& call, const std::shared_ptr<Ticket>& ticket,
              Dependencies after);

  // Returns once every execution submitted before has begun: later writes to weights do not affect
  // these. Not with the GIL. Throws ExecutionError inside a launch of this executable, whose end it
  // would wait for, and after close.
  void wait_for_submitted();

  // Takes the current storages of the weights' tensors.
  void rebind_weights();

  // Throws what an execution of this call would throw before it runs, for callers that change state
  // before it. Does not wait for executions in flight.
  void check_ready(const Call& call) const;

  LastExecution last_execution() const;

  // Address and bytes of the memory of activations if a call gives none; 0 before it is first
  // needed. Waits for executions in flight.
  std::pair<std::uint64_t, std::size_t> arena() const;

  // The names of submit's substages, in the resident's words.
  const std::vector<std::string>& substages() const { return substages_; }

  // What the first successful execution proved; no value before.
  std::optional<Proof> proof() const;

  // The latest execution that streamed weights and was measured for a timeline.
  LastExecution last_traced() const;

  // Records the executions that end before stop_trace. Throws ExecutionError if recording is on.
  void start_trace();
  bool is_tracing() const;
  std::vector<ExecutionTrace> stop_trace();

  // Clock reads of recording so far.
  std::uint64_t trace_clock_reads() const { return trace_clock_reads_; }

  // Whether the calling thread is inside a launch of this program, where waiting would deadlock.
  bool is_inside_launch() const;

  // Waits for what is in flight and releases what it holds; later executions fail. Inside one of
  // its launches nothing is waited for or released, and it returns false: another close, or the
  // destructor, does so.
  bool close() noexcept;

  // After close: releases the buffers of copied inputs and outputs. No call may be bound to the
  // spec meanwhile or afterwards.
  void release_buffers() noexcept { offload::release_buffers(spec_); }
  bool closed() const { return closed_; }

 private:
  void run(Call& call, bool queued);
  void run_queued(Call& call);
  static void run_submitted(std::shared_ptr<Replay> self, std::shared_ptr<Call> call,
                            std::shared_ptr<const HeldStorages> held,
                            std::shared_ptr<Ticket> ticket, Dependencies after);
  void enqueue(std::function<void()> task, std::shared_ptr<Ticket> ticket, bool hands_on);
  void refuse_inside_launch() const;
  bool is_own_thread() const;
  bool is_launching_here() const;
  bool is_executing_here() const;
  void refuse_wait() const;
  void refuse_run(bool queued) const;
  std::shared_ptr<const HeldStorages> hold_memory(Call& call) const;
  void copy_inputs(const Call& call, LastExecution& execution, ExecutionTrace* trace);
  void execute_launches(Call& call, LastExecution& execution, ExecutionTrace* trace);
  void launch(LastExecution& execution, ExecutionTrace* trace);
  void note_delivery(ExecutionTrace& trace) const;
  void note_proof(LastExecution& execution);
  void note_weights(LastExecution& execution, ExecutionTrace* trace);
  void hand_out(Call& call, ExecutionTrace* trace);
  void keep(const LastExecution& execution, std::optional<ExecutionTrace> trace);
  void check_weights(const Call& call);
  void follow(const Call& call);
  void resize(const Call& call, LastExecution& execution);
  void bind(const Call& call);
  std::uint64_t feature_map_address(const Call& call);

  CallSpec spec_;
  std::shared_ptr<Resident> resident_;
  Header header_;
  Weights weights_;                   // changed under both mutexes, read under either
  mutable std::mutex weights_mutex_;  // taken after the execution mutex
  // The resident's roles; null if absent.
  WeightPasses* weight_passes_;
  DeviceStreams* streams_;
  GeneratorStates* generators_;
  SizeChanges* size_changes_;
  std::vector<std::string> substages_;
  std::shared_ptr<const Instance> instance_;  // of the latest execution, where sizes vary
  OwnArena own_arena_;                        // at 0: it has none, and the turn's is used
  std::atomic<bool> closed_ = false;          // takes no new work
  bool released_ = false;                     // all earlier work has ended
  std::mutex close_mutex_;
  mutable std::mutex last_mutex_;
  LastExecution last_;
  LastExecution last_traced_;
  std::optional<Proof> proof_;
  bool has_run_ = false;                               // guarded by the execution mutex
  std::optional<std::vector<ExecutionTrace>> traces_;  // while recording; guarded by last_mutex_
  std::atomic<std::uint64_t> trace_clock_reads_ = 0;
  // Declared after what the lane's thread uses.
  std::shared_ptr<Turn> turn_ = std::make_shared<Turn>();
  bool owns_turn_ = true;
  bool keeps_turn_order_ = false;  // on the device, among the replays of its turn
  std::optional<HostScheduler> host_scheduler_;
};

}  // namespace offload
