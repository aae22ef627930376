#include "run/segment_dispatcher.hpp"

#include <c10/core/DeviceGuard.h>
#include <time.h>

#include <utility>

#include "offload/calling_back.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

std::size_t at_index(std::int64_t number) { return static_cast<std::size_t>(number); }

void finish(Ticket& ticket, std::exception_ptr error) noexcept {
  const CallingBack calling_back;
  ticket.finish(std::move(error));
}

// Binds a call of a segment, whose tensors are known.
void bind(const DispatchSite& site, Call& call, const Surroundings& asked) {
  Replay& replay = *site.replay;
  if (replay.closed()) throw ExecutionError("the executable is closed: load the program again");
  bind_call_in(replay, call, asked);
  if (site.draw) {
    const c10::Device device = replay.spec().device;
    const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
    replay.check_ready(call);  // a draw cannot be undone
    call.random = site.draw();
  }
}

// Adds the processor time of this thread to a sum while it lives, where that is measured.
class Stopwatch {
 public:
  Stopwatch(bool is_on, std::atomic<std::uint64_t>& sum_ns)
      : is_on_(is_on), sum_ns_(sum_ns), begin_ns_(is_on ? now_of_thread_ns() : 0) {}
  ~Stopwatch() {
    if (is_on_) sum_ns_ += now_of_thread_ns() - begin_ns_;
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  static std::uint64_t now_of_thread_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(now.tv_nsec);
  }

  bool is_on_;
  std::atomic<std::uint64_t>& sum_ns_;
  std::uint64_t begin_ns_;
};

// A call that is submitted once tickets have ended.
struct Behind {
  std::shared_ptr<const DispatchSpec> spec;
  std::shared_ptr<Replay> replay;
  std::shared_ptr<Call> call;
  std::shared_ptr<Ticket> ticket;  // has a DependencyError where one of the others has failed
  std::vector<std::shared_ptr<Ticket>> waits;
};

void submit_behind(const std::shared_ptr<Behind>& one) noexcept {
  try {
    for (const std::shared_ptr<Ticket>& awaited : one->waits) {
      if (awaited->done()) continue;
      return awaited->when_done([one] { one->spec->without_gil([&one] { submit_behind(one); }); });
    }
    for (const std::shared_ptr<Ticket>& awaited : one->waits) check_dependency(awaited->error());
    one->replay->submit(std::exchange(one->call, nullptr), one->ticket, {});
  } catch (...) {
    finish(*one->ticket, std::current_exception());
  }
}

}  // namespace

SegmentDispatcher::SegmentDispatcher(std::shared_ptr<const DispatchSpec> spec)
    : spec_(std::move(spec)), dispatch_(spec_->graph, spec_->objective) {
  spec_->check();
}

void SegmentDispatcher::add(std::shared_ptr<DispatchedExecution> execution,
                            std::vector<std::int64_t> devices) {
  ++n_under_way_;
  note({Event::Kind::kAdded, std::move(execution), 0, std::move(devices), nullptr});
}

void SegmentDispatcher::ring() noexcept { note({Event::Kind::kWoken, nullptr, 0, {}, nullptr}); }

void SegmentDispatcher::abandon() noexcept {
  if (n_under_way_ != 0) new std::shared_ptr<SegmentDispatcher>(shared_from_this());
  is_abandoned_ = true;
}

// ---- events ----

// An event that cannot be noted would never end its execution, and its ticket has no other way to
// say so: like any callback of a ticket this ends the process where memory has run out.
void SegmentDispatcher::note(Event event) noexcept {
  if (is_abandoned_) return;
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  act();
}

// Takes the next event, with whether others are behind it; false: there is none, or another thread
// acts, or this one further up.
bool SegmentDispatcher::take(Event& event, bool& is_last) {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) {
    is_acting_ = false;
    return false;
  }
  event = std::move(events_.front());
  events_.pop_front();
  is_last = events_.empty();
  return true;
}

void SegmentDispatcher::act() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_acting_, true)) return;
  }
  const std::shared_ptr<SegmentDispatcher> alive = shared_from_this();
  const Stopwatch acting(is_measured_, measured_.acting_ns);
  bool is_last = false;
  for (Event event; take(event, is_last); event = {}) {
    try {
      handle(event);
      if (is_last && !broken_) step();
    } catch (...) {
      broken_ = std::current_exception();
      end_all(broken_);
    }
    if (is_abandoned_) return;  // a launch or callback has forked, and this is the child
  }
}

void SegmentDispatcher::handle(Event& event) {
  switch (event.kind) {
    case Event::Kind::kAdded:
      return added(event.execution, event.numbers);
    case Event::Kind::kSegmentEnded:
      return segment_ended(event.execution, event.what, std::move(event.error));
    case Event::Kind::kCopyEnded:
      return copy_ended(event.execution, event.what, event.numbers, std::move(event.error));
    case Event::Kind::kWoken:
      armed_at_ns_ = std::numeric_limits<double>::infinity();
  }
}

void SegmentDispatcher::added(const Execution& execution,
                              const std::vector<std::int64_t>& devices) {
  try {
    if (broken_) std::rethrow_exception(broken_);
    execution->number = dispatch_.add(devices);
    executions_.emplace(execution->number, execution);
  } catch (...) {
    execution->fail(std::current_exception());
    end(execution);
  }
}

void SegmentDispatcher::segment_ended(const Execution& execution, std::int64_t segment,
                                      std::exception_ptr error) {
  if (broken_) return;
  dispatch_.segment_ended(execution->number, segment);
  if (error) return fail(*execution, std::move(error));
  execution->check.ended(segment);
  if (watch_) watch_(*execution, segment);
  const std::size_t n_devices = spec_->graph.n_devices;
  const std::size_t device = at_index(execution->devices[at_index(segment)]);
  const DispatchSite& site = spec_->sites[at_index(segment) * n_devices + device];
  if (!site.is_timed) return;
  const LastExecution last = site.replay->last_execution();
  const double took_ns = static_cast<double>(last.device_ns()) - static_cast<double>(last.proof.ns);
  spec_->paces->observe_at_once(device, site.cost_ns, took_ns);
}

void SegmentDispatcher::copy_ended(const Execution& execution, std::int64_t to,
                                   const std::vector<std::int64_t>& shared,
                                   std::exception_ptr error) {
  if (broken_) return;
  dispatch_.copy_ended(execution->number, to, shared);
  if (error) return fail(*execution, std::move(error));
  execution->check.arrived(to, values_of(shared));
}

void SegmentDispatcher::step() {
  spec_->paces->read(present_paces_);
  std::vector<DispatchCommand> commands =
      dispatch_.next(present_paces_, static_cast<double>(now_ns()));
  n_moved_ = dispatch_.n_moved();
  const double wake_at_ns = dispatch_.wake_at_ns();
  if (wake_at_ns < armed_at_ns_) {
    armed_at_ns_ = wake_at_ns;
    Alarm::instance().call_at(static_cast<std::uint64_t>(wake_at_ns), weak_from_this());
  }
  for (DispatchCommand& command : commands) {
    carry_out(command);
    if (is_abandoned_) return;
  }
}

void SegmentDispatcher::carry_out(DispatchCommand& command) {
  const Execution execution = executions_.at(command.execution);
  if (command.kind == DispatchCommand::Kind::kEnd) return end(execution);
  const bool begins = command.kind == DispatchCommand::Kind::kBegin;
  Event event{begins ? Event::Kind::kSegmentEnded : Event::Kind::kCopyEnded,
              execution,
              begins ? command.what : command.to,
              {},
              nullptr};
  if (!begins) event.numbers = command.values;
  std::shared_ptr<Ticket> ticket;
  try {
    ticket = begins ? begun(*execution, command.what, command.to)
                    : copied(*execution, command.what, command.to, command.values);
  } catch (...) {
    event.error = std::current_exception();
    return note(std::move(event));
  }
  ticket->when_done(
      [self = shared_from_this(), ended = ticket.get(), event = std::move(event)]() mutable {
        event.error = ended->error();  // it calls back, and so exists
        self->spec_->without_gil([&] { self->note(std::move(event)); });
      });
}

// ---- one execution ----

std::shared_ptr<Ticket> SegmentDispatcher::begun(DispatchedExecution& execution,
                                                 std::int64_t segment, std::int64_t device) {
  const SegmentGraph& graph = spec_->graph;
  const DispatchSite& site = spec_->sites[at_index(segment) * graph.n_devices + at_index(device)];
  if (!site.replay) throw PlanError("a segment begins on a device that does not have it");
  const std::int64_t memory = graph.memory_of[at_index(device)];
  execution.check.begun(segment, memory);
  execution.devices[at_index(segment)] = device;
  execution.observed[at_index(device)] = true;
  const auto call = std::make_shared<Call>();
  call->call_ns = now_ns();
  const auto& outputs = spec_->rules.outputs[at_index(segment)];
  for (const std::int64_t value : outputs) {
    if (!execution.held(value, memory).defined()) {
      execution.allocate(spec_->values[at_index(value)].group, memory);
    }
    call->given_results.push_back(execution.held(value, memory));
  }
  for (const std::int64_t value : spec_->rules.inputs[at_index(segment)]) {
    call->inputs.push_back(execution.held(value, memory));
  }
  const Surroundings& asked = execution.asked[at_index(device)];
  if (site.has_buffers) {
    spec_->with_gil([&] { bind(site, *call, asked); });
  } else {
    bind(site, *call, asked);
  }
  call->checked_ns = now_ns();
  auto ticket = std::make_shared<Ticket>();
  const auto& waits = execution.refreshed[at_index(memory)];
  const Stopwatch submitting(is_measured_, measured_.submitting_ns);
  ++measured_.n_segments;
  if (waits.empty()) {
    site.replay->submit(call, ticket, {});
  } else {
    submit_behind(std::make_shared<Behind>(Behind{spec_, site.replay, call, ticket, waits}));
  }
  return ticket;
}

std::shared_ptr<Ticket> SegmentDispatcher::copied(DispatchedExecution& execution,
                                                  std::int64_t producer, std::int64_t to,
                                                  const std::vector<std::int64_t>& shared) {
  const SegmentGraph& graph = spec_->graph;
  const std::int64_t origin =
      producer == kCaller ? graph.home
                          : graph.memory_of[at_index(execution.devices[at_index(producer)])];
  const std::vector<std::int64_t> values = values_of(shared);
  execution.check.copied(producer, origin, to, values);
  std::vector<CopyPiece> pieces;
  std::vector<bool> is_copied(spec_->groups.size(), false);
  for (const std::int64_t value : values) {
    const DispatchValue& one = spec_->values[at_index(value)];
    std::size_t size_bytes = one.size_bytes;
    if (producer == kCaller) {
      if (!execution.held(value, to).defined()) execution.allocate_given(value, to);
    } else {
      const auto& group = spec_->groups[one.group];
      if (is_copied[one.group]) continue;  // with the first of its group
      is_copied[one.group] = true;
      if (!execution.held(value, to).defined()) execution.allocate(one.group, to);
      if (group.size() > 1) size_bytes = block_bytes(*spec_, group);
    }
    pieces.push_back({execution.held(value, origin), execution.held(value, to), size_bytes});
  }
  return spec_->copy(execution, producer, origin, to, values, std::move(pieces));
}

std::vector<std::int64_t> SegmentDispatcher::values_of(
    const std::vector<std::int64_t>& shared) const {
  std::vector<std::int64_t> values;
  for (const std::int64_t one : shared) {
    const auto& found = spec_->shared[at_index(one)];
    values.insert(values.end(), found.begin(), found.end());
  }
  return values;
}

void SegmentDispatcher::fail(DispatchedExecution& execution, std::exception_ptr error) {
  execution.fail(std::move(error));
  dispatch_.abandon(execution.number);
}

// Ends an execution of which nothing is left.
void SegmentDispatcher::end(const Execution& execution) {
  const Execution ended = execution;  // the map's may be the caller's
  executions_.erase(ended->number);
  if (!ended->error()) {
    try {
      ended->check.finished();
      spec_->paces->forget(ended->observed);
    } catch (...) {
      ended->fail(std::current_exception());
    }
  }
  spec_->paces->end_execution();
  ended->release();
  --n_under_way_;
  finish(*ended->done, ended->error());
}

// What they have begun goes on, and keeps its tensors.
void SegmentDispatcher::end_all(const std::exception_ptr& error) noexcept {
  std::map<std::int64_t, Execution> executions;
  executions.swap(executions_);
  for (const auto& [_, one] : executions) {
    spec_->paces->end_execution();
    --n_under_way_;
    finish(*one->done, error);
  }
}

}  // namespace offload
