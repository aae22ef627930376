#include "offload/segment_dispatcher.hpp"

#include <time.h>

#include <string>
#include <utility>

#include "offload/calling_back.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"

namespace offload {
namespace {

std::size_t at_index(std::int64_t number) { return static_cast<std::size_t>(number); }

constexpr std::int64_t kNowhere = -1;

bool is_consequence(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DependencyError&) {
    return true;
  } catch (...) {
    return false;
  }
}

void finish(Ticket& ticket, std::exception_ptr error) noexcept {
  const CallingBack calling_back;
  ticket.finish(std::move(error));
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

struct Ended {
  std::shared_ptr<SegmentDispatcher> dispatcher;
  std::shared_ptr<DispatchedWork> execution;
};

// What a loop further up on this thread reports; null: there is none.
thread_local std::vector<Ended>* reported_above = nullptr;

}  // namespace

void DispatchPlan::check() const {
  const auto expect = [](bool fits, const char* what) {
    if (!fits) throw PlanError(std::string("the dispatch of segments: ") + what);
  };
  rules.check();
  expect(graph.memory_of.size() == graph.n_devices, "each device has a memory");
  expect(graph.home == rules.home, "both have the same home");
  expect(shared.size() == graph.values.size(), "shared Values are those of the graph");
  expect(paces && paces->size() == graph.n_devices, "each device has a pace");
  for (const auto& one : shared) {
    for (const std::int64_t value : one) {
      expect(value >= 0 && at_index(value) < rules.names.size(), "a number is that of a Value");
    }
  }
}

// ---- the work of an execution ----

DispatchedWork::DispatchedWork(std::shared_ptr<const DispatchPlan> plan,
                               std::shared_ptr<Ticket> done)
    : plan_(std::move(plan)),
      done_(std::move(done)),
      check_(plan_->rules),
      devices_(plan_->rules.inputs.size(), kNowhere),
      observed_(plan_->graph.n_devices, false) {}

// A thread that was interrupted between the two leaves it so. Callbacks may run Python.
DispatchedWork::~DispatchedWork() {
  if (is_added_ || done_->done()) return;
  finish(*done_, std::make_exception_ptr(
                     ExecutionError("the submission was interrupted: nothing has begun")));
}

void DispatchedWork::fail(std::exception_ptr error) noexcept {
  const bool follows = is_consequence(error);
  if (error_ && (!is_consequence_ || follows)) return;
  error_ = std::move(error);
  is_consequence_ = follows;
}

// ---- the dispatcher ----

SegmentDispatcher::SegmentDispatcher(std::shared_ptr<const DispatchPlan> plan)
    : plan_(std::move(plan)), dispatch_(plan_->graph, plan_->objective) {
  plan_->check();
}

void SegmentDispatcher::add(std::shared_ptr<DispatchedWork> execution,
                            std::vector<std::int64_t> devices) {
  if (Lane::all_closed()) {  // one that acts would not end while a thread goes on adding
    return finish(*execution->done_, std::make_exception_ptr(ExecutionError(
                                         "the interpreter is exiting: nothing begins any more")));
  }
  execution->is_added_ = true;
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

// Takes the next event, with whether others are behind it; false: there is none, and this thread no
// longer acts, but has what has ended to report.
bool SegmentDispatcher::take(Event& event, bool& is_last, std::vector<Execution>& ended) {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) {
    ended.swap(ended_);
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
    if (std::exchange(is_acting_, true)) return;  // another thread acts, or this one further up
  }
  const std::shared_ptr<SegmentDispatcher> alive = shared_from_this();
  const Stopwatch acting(is_measured_, measured_.acting_ns);
  std::vector<Execution> ended;
  act_on_events(ended);
  if (!ended.empty()) report(std::move(ended));
}

void SegmentDispatcher::act_on_events(std::vector<Execution>& ended) noexcept {
  bool is_last = false;
  for (Event event; take(event, is_last, ended); event = {}) {
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
    execution->number_ = dispatch_.add(devices);
    executions_.emplace(execution->number_, execution);
  } catch (...) {
    execution->fail(std::current_exception());
    end(execution);
  }
}

void SegmentDispatcher::segment_ended(const Execution& execution, std::int64_t segment,
                                      std::exception_ptr error) {
  if (broken_) return;
  dispatch_.segment_ended(execution->number_, segment);
  if (error) return fail(*execution, std::move(error));
  execution->check_.ended(segment);
  const std::int64_t device = execution->devices_[at_index(segment)];
  const auto took = execution->took(segment, device);
  if (!took) return;
  plan_->paces->observe_at_once(at_index(device), took->expected_ns, took->measured_ns);
}

void SegmentDispatcher::copy_ended(const Execution& execution, std::int64_t to,
                                   const std::vector<std::int64_t>& shared,
                                   std::exception_ptr error) {
  if (broken_) return;
  dispatch_.copy_ended(execution->number_, to, shared);
  if (error) return fail(*execution, std::move(error));
  execution->check_.arrived(to, values_of(shared));
}

void SegmentDispatcher::step() {
  plan_->paces->read(present_paces_);
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
        self->plan_->without_gil([&] { self->note(std::move(event)); });
      });
}

// ---- one execution ----

std::shared_ptr<Ticket> SegmentDispatcher::begun(DispatchedWork& execution, std::int64_t segment,
                                                 std::int64_t device) {
  execution.check_.begun(segment, plan_->graph.memory_of[at_index(device)]);
  execution.devices_[at_index(segment)] = device;
  execution.observed_[at_index(device)] = true;
  execution.bind(segment, device);
  const Stopwatch submitting(is_measured_, measured_.submitting_ns);
  ++measured_.n_segments;
  return execution.submit(segment, device);
}

std::shared_ptr<Ticket> SegmentDispatcher::copied(DispatchedWork& execution, std::int64_t producer,
                                                  std::int64_t to,
                                                  const std::vector<std::int64_t>& shared) {
  const SegmentGraph& graph = plan_->graph;
  const std::int64_t origin =
      producer == kCaller ? graph.home
                          : graph.memory_of[at_index(execution.devices_[at_index(producer)])];
  const std::vector<std::int64_t> values = values_of(shared);
  execution.check_.copied(producer, origin, to, values);
  return execution.copy(producer, origin, to, values);
}

std::vector<std::int64_t> SegmentDispatcher::values_of(
    const std::vector<std::int64_t>& shared) const {
  std::vector<std::int64_t> values;
  for (const std::int64_t one : shared) {
    const auto& found = plan_->shared[at_index(one)];
    values.insert(values.end(), found.begin(), found.end());
  }
  return values;
}

void SegmentDispatcher::fail(DispatchedWork& execution, std::exception_ptr error) {
  execution.fail(std::move(error));
  dispatch_.abandon(execution.number_);
}

// Ends an execution of which nothing is left.
void SegmentDispatcher::end(const Execution& execution) {
  const Execution ended = execution;  // the map's may be the caller's
  executions_.erase(ended->number_);
  if (!ended->error()) {
    try {
      ended->check_.finished();
      plan_->paces->forget(ended->observed_);
    } catch (...) {
      ended->fail(std::current_exception());
    }
  }
  plan_->paces->end_execution();
  ended_.push_back(ended);
}

// All with one acquisition of the GIL, which the tensors of the caller and most callbacks need. A
// callback that submits may act in turn; what ends there is reported by the loop further up, so
// that the depth of calls does not grow.
void SegmentDispatcher::report(std::vector<Execution> ended) noexcept {
  std::vector<Ended> own;
  std::vector<Ended>& all = reported_above == nullptr ? own : *reported_above;
  for (Execution& one : ended) all.push_back({shared_from_this(), std::move(one)});
  if (reported_above != nullptr) return;
  reported_above = &own;
  plan_->with_gil([&own] {
    for (std::size_t at = 0; at < own.size(); ++at) {
      const Ended one = std::move(own[at]);
      one.dispatcher->report(*one.execution);
    }
  });
  reported_above = nullptr;
}

void SegmentDispatcher::report(DispatchedWork& ended) noexcept {
  if (is_abandoned_) return;  // a callback has forked, and this is the child
  ended.release();
  --n_under_way_;
  const Stopwatch ending(is_measured_, measured_.ending_ns);
  finish(*ended.done_, ended.error());
}

// What they have begun goes on, and keeps its tensors.
void SegmentDispatcher::end_all(const std::exception_ptr& error) noexcept {
  std::map<std::int64_t, Execution> executions;
  executions.swap(executions_);
  for (const auto& [_, one] : executions) {
    plan_->paces->end_execution();
    --n_under_way_;
    finish(*one->done_, error);
  }
}

}  // namespace offload
