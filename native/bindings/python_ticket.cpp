#include "python_ticket.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "gil.hpp"
#include "offload/calling_back.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"
#include "raise_as.hpp"
#include "raised_in_python.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using std::chrono::nanoseconds;

// The interval at which a wait checks for signals.
constexpr nanoseconds kSignalsLookedAt = std::chrono::milliseconds(50);

// Longer timeouts are cut to this, so that they can be counted in ns.
constexpr double kLongestSeconds = 1e9;

// Sleeping this long costs no more than the wake-up of an event loop by another thread.
constexpr nanoseconds kSoon = std::chrono::microseconds(50);

std::shared_ptr<py::object> shared(py::object function) {
  return {new py::object(std::move(function)), [](py::object* one) {
            const GilHeld held;
            delete one;
          }};
}

// Refuses to wait on a thread for work that the same thread must do, or that begins after an
// execution that the same thread is in. `bound`: the work's execution; without a call if unknown.
void refuse_own_wait(Ticket& ticket, const BoundCall& bound) {
  if (Lane::is_own_work(ticket)) {
    throw ExecutionError(
        "a launch, or a done-callback, waits for an execution that runs on its own thread: "
        "return first");
  }
  if (Lane::calls_back()) {
    throw ExecutionError(
        "a done-callback waits for another ticket, and blocks the thread that called it: add a "
        "callback to that ticket, or wait in another thread");
  }
  if (bound.call != nullptr && bound.replay->replay().is_inside_launch() &&
      !ticket.wait_for_issue(nanoseconds(0))) {
    throw ExecutionError(
        "a launch waits for another execution of its own executable, which begins once this one "
        "has ended: return first");
  }
}

}  // namespace

PythonTicket::~PythonTicket() { note_executed(); }

void PythonTicket::place(py::object keep, const PythonReplay& called, BoundCall bound) {
  keep_ = std::move(keep);
  called_ = &called;
  bound_ = std::move(bound);
}

void PythonTicket::note_executed() {
  if (is_counted_ || !is_placed() || !ticket_->done() || ticket_->error()) return;
  is_counted_ = true;
  called_->note_executed(bound_);
}

Dependency PythonTicket::as_dependency(const Replay& replay, const Call& call) const {
  Dependency dependency{ticket_, false, std::nullopt};
  if (!is_placed()) return dependency;
  const Replay& before = bound_.replay->replay();
  if (!replay.has_streams() || !before.has_streams() ||
      replay.spec().device != before.spec().device) {
    return dependency;
  }
  // Who follows torch's stream knows no handle of it.
  if (bound_.call->torch_stream && call.torch_stream) {
    dependency.is_on_device = true;
    if (*bound_.call->torch_stream != *call.torch_stream) {
      dependency.stream = bound_.call->torch_stream;
    }
  } else if (bound_.call->stream == call.stream) {
    dependency.is_on_device = true;
  }
  return dependency;
}

bool PythonTicket::cancelled() const {
  try {
    if (const std::exception_ptr error = ticket_->error()) std::rethrow_exception(error);
  } catch (const CancelledError&) {
    return true;
  } catch (...) {
  }
  return false;
}

void PythonTicket::wait_in_slices(std::optional<double> timeout_s,
                                  const std::function<bool(nanoseconds)>& wait_for) const {
  const auto begin = std::chrono::steady_clock::now();
  const nanoseconds longest(
      timeout_s ? static_cast<std::int64_t>(1e9 * std::clamp(*timeout_s, 0.0, kLongestSeconds))
                : 0);
  while (true) {
    nanoseconds slice = kSignalsLookedAt;
    if (timeout_s) {
      const nanoseconds left = longest - (std::chrono::steady_clock::now() - begin);
      slice = std::clamp(left, nanoseconds(0), slice);
    }
    {
      const GilReleased release;
      if (wait_for(slice)) return;
    }
    // Python's signal handlers, as for Ctrl-C, run on the main thread, which may be this one.
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout_s && std::chrono::steady_clock::now() - begin >= longest) {
      PyErr_SetString(PyExc_TimeoutError, "the execution has not ended within the timeout");
      throw py::error_already_set();
    }
  }
}

void PythonTicket::await_end(std::optional<double> timeout_s) const {
  const std::shared_ptr<Ticket> ticket = ticket_;
  if (ticket->done()) return;
  refuse_own_wait(*ticket, bound_);
  wait_in_slices(timeout_s, [&](nanoseconds time) {
    Lane::refuse_wait_beside_fork(*ticket);
    return ticket->wait_for(time);
  });
}

void PythonTicket::wait(std::optional<double> timeout_s) {
  await_end(timeout_s);
  if (const std::exception_ptr error = ticket_->error()) {
    is_told_ = true;
    std::rethrow_exception(error);
  }
  note_executed();
}

bool PythonTicket::wait_soon() const {
  const std::shared_ptr<Ticket> ticket = ticket_;
  if (ticket->done()) return true;
  if (!is_placed() || Lane::calls_back()) return false;
  const LastExecution last = bound_.replay->replay().last_execution();
  if (last.n_executions == 0 || nanoseconds(last.end_ns - last.begin_ns) > kSoon) return false;
  const GilReleased release;
  return ticket->wait_for(kSoon);
}

py::object PythonTicket::outcome(std::optional<double> timeout_s) const {
  await_end(timeout_s);
  const std::exception_ptr error = ticket_->error();
  return error ? in_python(error) : py::none();
}

py::object PythonTicket::result(std::optional<double> timeout_s) {
  wait(timeout_s);
  if (!result_) {
    py::object built = bound_.replay->result(*bound_.call);
    if (!result_) result_ = std::move(built);  // another thread may have been first
  }
  return result_;
}

py::object PythonTicket::promised() {
  if (!result_) {
    const bool is_known = is_placed() && (bound_.replay->promises_results() ||
                                          (ticket_->done() && !ticket_->error()));
    if (!is_known) return {};
    py::object built = bound_.replay->result(*bound_.call);
    if (!result_) result_ = std::move(built);
  }
  return result_;
}

std::optional<c10::Stream> PythonTicket::issued_to() const {
  const std::shared_ptr<Ticket> ticket = ticket_;
  if (!ticket->done()) {
    refuse_own_wait(*ticket, bound_);
    wait_in_slices(std::nullopt, [&](nanoseconds time) {
      Lane::refuse_wait_beside_fork(*ticket);
      return ticket->wait_for_issue(time);
    });
  }
  if (const std::exception_ptr error = ticket->error()) std::rethrow_exception(error);
  return is_placed() ? bound_.call->torch_stream : std::nullopt;
}

void PythonTicket::set_result(py::object result) {
  result_ = std::move(result);
  const CallingBack calling_back;
  ticket_->finish(nullptr);
}

void PythonTicket::set_error(py::object error) {
  const CallingBack calling_back;
  ticket_->finish(std::make_exception_ptr(RaisedInPython(std::move(error))));
}

bool PythonTicket::fail_as(const PythonTicket& other) {
  try {
    check_dependency(other.ticket_->error());
    return false;
  } catch (...) {
    const CallingBack calling_back;
    ticket_->finish(std::current_exception());
    return true;
  }
}

void PythonTicket::add_done_callback(py::object function) {
  ticket_->when_done([function = shared(std::move(function))] {
    const GilHeld held;
    try {
      (*function)();
    } catch (py::error_already_set& error) {
      error.restore();
      PyErr_WriteUnraisable(function->ptr());
    }
  });
}

}  // namespace offload
