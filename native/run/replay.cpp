#include "run/replay.hpp"

#include <ATen/ops/copy.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "device/captured_stream.hpp"
#include "offload/claimed_lanes.hpp"
#include "offload/errors.hpp"
#include "offload/host_stages.hpp"
#include "offload/lease.hpp"
#include "run/kernel_scope.hpp"
#include "run/overlaps.hpp"
#include "run/thread_count.hpp"

namespace offload {

namespace {

constexpr const char* kCalledItself =
    "a launch of this executable executes the executable itself: load the program again, and let "
    "the launch execute that one";

std::uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::uint64_t>(tensor.const_data_ptr());
}

// Sets a flag while it lives: a launch may run Python, which may call back.
class Running {
 public:
  explicit Running(bool& flag) : flag_(flag) { flag_ = true; }
  ~Running() { flag_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  bool& flag_;
};

// The interval at which a launch that waits for queued work looks whether a fork waits for it.
constexpr auto kForkLookedAt = std::chrono::milliseconds(50);

// Throws the work's error, or that of a refused wait: work that has not begun is then cancelled.
void await_queued(Ticket& ticket) {
  try {
    while (!ticket.wait_for(kForkLookedAt)) Lane::refuse_wait_beside_fork(ticket);
  } catch (const ExecutionError&) {
    ticket.cancel();
    throw;
  }
  ticket.wait();
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Whether a copy is a copy of contiguous bytes.
bool is_of_bytes(const Copy& copy) {
  return copy.from.scalar_type() == copy.to.scalar_type() && copy.from.sizes() == copy.to.sizes() &&
         copy.from.strides() == copy.to.strides() && copy.from.is_conj() == copy.to.is_conj() &&
         copy.from.is_neg() == copy.to.is_neg() && copy.from.is_non_overlapping_and_dense();
}

// Makes a copy, and returns whether torch made it; its times are kept for a timeline. `streams` may
// be null; it copies plain bytes.
bool carry_out(DeviceStreams* streams, const Copy& copy, bool inbound, ExecutionTrace* trace) {
  const std::uint64_t begin_ns = trace == nullptr ? 0 : now_ns();
  const bool is_done =
      streams != nullptr && is_of_bytes(copy) &&
      streams->copy(address_of(copy.to), address_of(copy.from), copy.from.nbytes());
  if (!is_done) const_cast<at::Tensor&>(copy.to).copy_(copy.from);
  if (trace != nullptr) {
    trace->transfers.push_back({begin_ns, now_ns(), copy.from.nbytes(), inbound});
  }
  return !is_done;
}

}  // namespace

Replay::Replay(CallSpec spec, std::vector<Trigger> triggers, std::shared_ptr<Resident> resident,
               bool host_scheduled)
    : spec_(std::move(spec)),
      resident_(std::move(resident)),
      header_(std::move(triggers), resident_->relocations()),
      weights_(spec_),
      weight_passes_(resident_->weight_passes()),
      streams_(resident_->device_streams()),
      generators_(resident_->generator_states()),
      size_changes_(resident_->size_changes()),
      substages_(resident_->substages()),
      own_arena_(resident_->arena().value_or(OwnArena{})) {
  prepare_overlap_checks(spec_);
  make_buffers(spec_);
  spec_.returns_weights =
      std::any_of(spec_.results.begin(), spec_.results.end(),
                  [](const ResultSpec& result) { return result.source == ResultSource::kWeight; });
  if (host_scheduled && !resident_->delivers_launches()) host_scheduler_.emplace(*resident_);
  // Others join a resident whose launches torch delivers, and no other.
  keeps_turn_order_ = has_streams() && streams_->follows_torch();
  rebind_weights();
}

void Replay::join(const Replay& other) {
  turn_ = other.turn_;
  owns_turn_ = false;
  keeps_turn_order_ = has_streams();
}

// Whether this is a thread that carries out launches beside the executing thread.
bool Replay::is_launching_here() const {
  return (host_scheduler_ && host_scheduler_->is_device_thread()) ||
         ClaimedLanes::is_helping_with(resident_.get()) ||
         HostStages::is_helping_with(resident_.get());
}

// A launch may run Python, which may call back: waiting on these threads would deadlock.
void Replay::refuse_inside_launch() const {
  if (is_own_thread() || is_launching_here()) throw ExecutionError(kCalledItself);
}

// Except while the thread runs a ticket's callbacks.
bool Replay::is_own_thread() const {
  return turn_->lane.is_current_thread() && !Lane::calls_back();
}

// The mutex is recursive: during an execution only the executing thread can take it.
bool Replay::is_executing_here() const {
  const std::unique_lock lock(turn_->lane.execution_mutex(), std::try_to_lock);
  return lock.owns_lock() && turn_->running;
}

bool Replay::is_inside_launch() const {
  return is_own_thread() || is_launching_here() || is_executing_here();
}

// A thread that must do the work may not wait for it while it runs a ticket's callbacks, either.
void Replay::refuse_wait() const {
  refuse_inside_launch();
  if (Lane::calls_back() && !turn_->lane.idle()) {
    throw ExecutionError(
        "a done-callback waits for an executable that has work to do, and blocks the thread that "
        "called it: submit there");
  }
}

void Replay::execute(const std::shared_ptr<Call>& call) {
  refuse_wait();
  if (turn_->lane.idle()) {
    run(*call, /*queued=*/false);
  } else {
    if (is_executing_here()) throw ExecutionError(kCalledItself);  // queued work waits for this
    const auto ticket = std::make_shared<Ticket>();
    enqueue(
        [self = shared_from_this(), call, held = hold_memory(*call)] { self->run_queued(*call); },
        ticket, /*hands_on=*/false);
    await_queued(*ticket);
  }
}

void Replay::submit(const std::shared_ptr<Call>& call, const std::shared_ptr<Ticket>& ticket,
                    Dependencies after) {
  refuse_inside_launch();
  if (is_executing_here()) throw ExecutionError(kCalledItself);  // its launch would wait for it
  auto held = hold_memory(*call);
  if (has_streams()) {
    enqueue(
        [self = shared_from_this(), call, held = std::move(held), ticket,
         after = std::move(after)]() mutable {
          run_submitted(std::move(self), std::move(call), std::move(held), std::move(ticket),
                        std::move(after));
        },
        ticket, /*hands_on=*/true);
  } else {
    enqueue(
        [self = shared_from_this(), call, held = std::move(held), after = std::move(after)] {
          wait_for(after, *call);
          self->run_queued(*call);
        },
        ticket, /*hands_on=*/false);
  }
}

void Replay::enqueue(std::function<void()> task, std::shared_ptr<Ticket> ticket, bool hands_on) {
  if (closed_) throw ExecutionError("the executable is closed: load the program again");
  try {
    turn_->lane.submit(std::move(task), std::move(ticket), hands_on);
  } catch (const std::logic_error&) {
    throw ExecutionError("the executable is closed, or the interpreter is exiting");
  }
}

std::shared_ptr<const HeldStorages> Replay::hold_memory(Call& call) const {
  if (call.n_threads == 0) call.n_threads = at::get_num_threads();
  std::shared_ptr<const StoragePins> weights;
  {
    const std::lock_guard lock(weights_mutex_);
    weights = weights_.pins();
    check_weight_overlaps(spec_, call, &weights_.memory());
  }
  return hold(call, std::move(weights));
}

// On the lane's thread, where torch must be set to the stream of its own work.
void Replay::run_queued(Call& call) {
  c10::OptionalStreamGuard torch_stream;
  if (call.torch_stream) torch_stream.reset_stream(*call.torch_stream);
  use_threads(call.n_threads);
  run(call, /*queued=*/true);
}

// Enqueues the execution. The finisher ends the ticket when the device is done, also after a
// failure, since part of the execution may be under way and must have ended by then. Nothing of the
// execution is kept here, so that it is destroyed when the ticket is done; closing, which waits for
// this thread, keeps the replay alive.
void Replay::run_submitted(std::shared_ptr<Replay> self, std::shared_ptr<Call> call,
                           std::shared_ptr<const HeldStorages> held, std::shared_ptr<Ticket> ticket,
                           Dependencies after) {
  Replay& replay = *self;
  const std::shared_ptr<Turn> turn = replay.turn_;
  std::exception_ptr error;  // the first
  std::shared_ptr<Fence> fence;
  try {
    wait_for(after, *call);
    replay.run_queued(*call);
    ticket->issue();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    const std::lock_guard lock(turn->lane.execution_mutex());
    fence = replay.streams_->fence();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  std::function<void()> end = [self = std::move(self), call = std::move(call),
                               held = std::move(held), fence = std::move(fence),
                               after = std::move(after), error] {
    try {
      if (fence) fence->wait();
    } catch (const ExecutionError&) {
      if (!error) throw;
    }
    if (error) std::rethrow_exception(error);
    check_on_device(after);
  };
  try {
    return turn->finisher.submit(std::move(end), ticket);
  } catch (const std::exception&) {  // the interpreter is exiting, or there is no thread left
  }
  std::exchange(end, nullptr)();
  ticket->finish(nullptr);
}

void Replay::wait_for_submitted() {
  refuse_wait();
  // If another thread holds the mutex, its execution has begun; this thread's must not end first.
  if (is_executing_here()) throw ExecutionError(kCalledItself);
  if (turn_->lane.idle()) return;
  const auto ticket = std::make_shared<Ticket>();
  enqueue([] {}, ticket, /*hands_on=*/false);
  await_queued(*ticket);
}

void Replay::rebind_weights() {
  Weights::Replaced replaced;  // outlives the locks
  const std::lock_guard lock(turn_->lane.execution_mutex());
  const std::lock_guard weights_lock(weights_mutex_);
  replaced = weights_.rebind();
  weights_.bind(header_);
}

void Replay::check_ready(const Call& call) const {
  refuse_inside_launch();
  const std::lock_guard lock(weights_mutex_);
  check_weight_overlaps(spec_, call, weights_.check() ? &weights_.memory() : nullptr);
}

std::uint64_t Replay::feature_map_address(const Call& call) {
  const std::size_t needed_bytes = call.shapes->feature_map_bytes;
  if (needed_bytes == 0) return 0;
  if (call.feature_map.defined()) return address_of(call.feature_map);
  if (own_arena_.address != 0) return own_arena_.address;
  Turn& turn = *turn_;
  if (turn.arena_bytes < needed_bytes) {
    if (has_streams()) {  // what the device still runs has its activations there
      if (const std::unique_ptr<Fence> end = streams_->fence()) end->wait();
    }
    turn.arena.clear();  // not read between executions
    turn.arena_bytes = 0;
    turn.arena = allocate(spec_.device, needed_bytes, "the feature map");
    turn.arena_bytes = needed_bytes;
  }
  return reinterpret_cast<std::uint64_t>(turn.arena.get());
}

// Each resident orders its own executions on the device. Behind that of another resident of the
// turn an event orders them; where torch delivers launches later, from a queue, these are delivered
// before a resident that does not use the queue goes on.
void Replay::follow(const Call& call) {
  if (!call.torch_stream) return;
  const bool was_other = turn_->last_stream && turn_->last != this;
  if (was_other && *turn_->last_stream != *call.torch_stream) {
    // What the caller captures is executed elsewhere and later, and cannot wait for this.
    if (is_being_captured(*call.torch_stream)) return;
    c10::Event event(call.torch_stream->device_type());
    event.record(*turn_->last_stream);
    event.block(*call.torch_stream);
  }
  if (was_other && call.drains_queue) call.torch_stream->native_handle();
  turn_->last = this;
  turn_->last_stream = call.torch_stream;
}

void Replay::resize(const Call& call, LastExecution& execution) {
  execution.sizes_found = call.sizes_found;
  execution.sizes = call.instance->sizes;
  if (call.instance == instance_) return;
  const std::uint64_t begin_ns = now_ns();
  const auto before = std::exchange(instance_, nullptr);  // null if resizing fails
  size_changes_->resize(call.instance->program);
  instance_ = call.instance;
  execution.resize_ns = now_ns() - begin_ns;
}

void Replay::bind(const Call& call) {
  for (std::size_t index = 0; index < spec_.inputs.size(); ++index) {
    if (spec_.inputs[index].on_host) continue;
    header_.bind(spec_.inputs[index].slot, address_of(call.bound_inputs[index]));
  }
  for (std::size_t index = 0; index < spec_.outputs.size(); ++index) {
    if (!spec_.outputs[index].operator_allocated) {
      header_.bind(spec_.outputs[index].slot, call.output_addresses[index]);
    }
  }
  header_.bind(spec_.feature_map_slot, feature_map_address(call));
}

void Replay::refuse_run(bool queued) const {
  if (turn_->running) throw ExecutionError(kCalledItself);
  if (released_ || (closed_ && !queued)) {
    throw ExecutionError("the executable is closed: load the program again");
  }
}

void Replay::run(Call& call, bool queued) {
  const ExecutionLock lock(turn_->lane);
  const bool waited = queued || lock.waited();
  refuse_run(queued);
  const Running running(turn_->running);
  std::optional<ExecutionTrace> trace;
  {
    const std::lock_guard last_lock(last_mutex_);
    if (traces_) trace.emplace(resident_->n_launches());
  }
  ExecutionTrace* const traced = trace ? &*trace : nullptr;
  LastExecution execution;
  execution.call_ns = call.call_ns;
  execution.checked_ns = call.checked_ns;
  execution.drain = call.drain;
  if (weight_passes_ != nullptr) weight_passes_->trace_weights(traced != nullptr);
  execution.begin_ns = waited || trace ? now_ns() : call.checked_ns;  // a trace is no header work
  if (trace && !waited) trace->clock_reads = 1;
  check_weights(call);
  check_held(spec_, call);
  std::optional<KernelScope> scope;
  if (!has_streams() || call.has_copies()) scope.emplace();  // otherwise nothing of torch runs here
  if (has_streams()) streams_->set_stream(call.stream);
  if (keeps_turn_order_) follow(call);
  if (!call.random.empty()) generators_->set_random(call.random);
  if (call.instance) resize(call, execution);
  copy_inputs(call, execution, traced);
  bind(call);
  execution.bound_ns = now_ns();
  execution.counts.policy = header_.policy();
  execution.decided_ns = now_ns();
  execution.patched_ns = execution.decided_ns;
  if (execution.counts.policy != Policy::kNone) {
    resident_->patch(header_.refresh(execution.counts));
    execution.patched_ns = now_ns();
  }
  execute_launches(call, execution, traced);
  execution.end_ns = now_ns();
  if (weight_passes_ != nullptr) note_weights(execution, traced);
  hand_out(call, traced);
  call.execution_ns = execution.end_ns - execution.begin_ns - execution.proof.ns;
  execution.bytes_copied = call.bytes_copied;
  execution.outputs_allocated = call.outputs_allocated;
  keep(execution, std::move(trace));
}

// Under the execution mutex, so that the weights cannot change after the check.
void Replay::check_weights(const Call& call) {
  if (!weights_.check()) {
    const std::lock_guard lock(weights_mutex_);
    weights_.bind(header_);
  }
  check_weight_overlaps(spec_, call, &weights_.memory());
}

// Torch may deliver its own copies later from another thread, as torch_npu does; asking for the
// stream's handle waits for that.
void Replay::copy_inputs(const Call& call, LastExecution& execution, ExecutionTrace* trace) {
  bool by_torch = false;
  for (const Copy& copy : call.copies_in) {
    by_torch |= carry_out(streams_, copy, /*inbound=*/true, trace);
  }
  if (!by_torch || !call.torch_stream || streams_->follows_torch()) return;
  if (call.drains_queue) execution.drain_of_copies.begin_ns = now_ns();
  call.torch_stream->native_handle();
  if (call.drains_queue) execution.drain_of_copies.end_ns = now_ns();
}

void Replay::execute_launches(Call& call, LastExecution& execution, ExecutionTrace* trace) {
  const std::uint64_t shared = call.feature_map.defined() ? address_of(call.feature_map) : 0;
  const Lease lease(shared, shared == 0 ? 0 : shared + call.shapes->feature_map_bytes);
  if (own_arena_.lease_id == 0) return launch(execution, trace);
  // Always taken after the other lease, so that executions cannot deadlock.
  const Lease own(own_arena_.lease_id, own_arena_.lease_id + 1);
  launch(execution, trace);
}

void Replay::launch(LastExecution& execution, ExecutionTrace* trace) {
  LaunchTimes* const launches = trace == nullptr ? nullptr : &trace->launches;
  if (host_scheduler_) {
    host_scheduler_->execute(execution.submission.end_ns, launches,
                             trace == nullptr ? nullptr : &trace->issues);
  } else {
    const bool delivers = trace != nullptr && resident_->delivers_launches();
    resident_->execute(execution.submission, delivers ? &trace->issues : launches);
    if (delivers) note_delivery(*trace);
  }
  if (!has_run_) {
    note_proof(execution);
  } else if (execution.resize_ns != 0) {
    execution.proof = resident_->proof();
  }
}

// Completes a finished program: outputs, copies to the caller's tensors, versions.
void Replay::hand_out(Call& call, ExecutionTrace* trace) {
  for (std::size_t index = 0; index < spec_.outputs.size(); ++index) {
    const OutputSpec& output = spec_.outputs[index];
    if (output.operator_allocated) call.outputs[index] = resident_->take(output.slot);
  }
  for (std::size_t index = 0; spec_.returns_weights && index < spec_.results.size(); ++index) {
    const ResultSpec& result = spec_.results[index];
    const bool is_weight = result.source == ResultSource::kWeight;
    call.weights.push_back(is_weight ? spec_.weights[result.index].place() : c10::Storage());
  }
  for (const Copy& copy : call.copies_out) carry_out(streams_, copy, /*inbound=*/false, trace);
  for (const std::size_t index : call.copied_results) {
    const ResultShape& shape = call.shapes->results[index];
    const at::Tensor from = tensor_on(call.outputs[spec_.results[index].index], shape.offset_bytes,
                                      shape.layout, spec_.device);
    carry_out(streams_, {from, call.given_results[index]}, /*inbound=*/false, trace);
  }
  for (const Copy& copy : call.copies_back) carry_out(streams_, copy, /*inbound=*/false, trace);
  for (std::size_t index = 0; index < spec_.inputs.size(); ++index) {
    if (spec_.inputs[index].written) bump_version(call.inputs[index]);
  }
  for (const std::size_t weight : spec_.written_weights) {
    bump_version(spec_.weights[weight].holders.front());
  }
  for (const at::Tensor& given : call.given_results) {
    if (given.defined()) bump_version(given);
  }
}

std::pair<std::uint64_t, std::size_t> Replay::arena() const {
  const std::lock_guard lock(turn_->lane.execution_mutex());
  return {reinterpret_cast<std::uint64_t>(turn_->arena.get()), turn_->arena_bytes};
}

bool Replay::close() noexcept {
  closed_ = true;
  if (is_launching_here() || is_executing_here()) return false;
  const std::lock_guard close_lock(close_mutex_);  // a concurrent caller waits, too
  if (owns_turn_) turn_->lane.close();
  if (host_scheduler_) host_scheduler_->close();
  if (owns_turn_) turn_->finisher.close();
  const std::lock_guard lock(turn_->lane.execution_mutex());
  released_ = true;
  resident_->close();
  if (owns_turn_) {
    turn_->arena.clear();
    turn_->arena_bytes = 0;
  }
  instance_.reset();
  return true;
}

}  // namespace offload
