// Tickets as Python has them. All needs the GIL, and none of the waits keeps it.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>

#include "offload/ticket.hpp"
#include "python_replay.hpp"
#include "run/dependencies.hpp"

namespace offload {

// A ticket with what its result is made of: an execution that was submitted, or an object that
// somebody sets.
//
// Owner: Python. Errors: those of the work, at each question for its result.
class PythonTicket {
 public:
  PythonTicket() : ticket_(std::make_shared<Ticket>()) {}

  PythonTicket(const PythonTicket&) = delete;
  PythonTicket& operator=(const PythonTicket&) = delete;
  ~PythonTicket();

  // Makes it that of an execution that was submitted; `keep` keeps the replay that was called.
  void place(pybind11::object keep, const PythonReplay& called, BoundCall bound);

  // Whether it is that of an execution whose arguments are known.
  bool is_placed() const { return bound_.call != nullptr; }

  // What an execution of `replay` on `call` waits for, so that this one's results may be used.
  Dependency as_dependency(const Replay& replay, const Call& call) const;

  const std::shared_ptr<Ticket>& ticket() const { return ticket_; }
  bool cancelled() const;

  // Whether its error was raised to somebody, or will be by who says so.
  bool is_told() const { return is_told_; }
  void tell() { is_told_ = true; }

  // Waits a moment where the latest execution took no longer; whether it has ended.
  bool wait_soon() const;

  // Waits as `wait`, and gives its error as an object of Python's; None: it ended well.
  pybind11::object outcome(std::optional<double> timeout_s) const;

  // Waits until it has ended, for so many seconds at most, and rethrows its error. Python's
  // TimeoutError where it has not; ExecutionError on a thread that has to do the work itself.
  void wait(std::optional<double> timeout_s);

  // Waits, and gives what the model returns, or what was set; the same at each call.
  pybind11::object result(std::optional<double> timeout_s);

  // Its result, which may be without content yet: for an execution behind this one. Null where it
  // is not known.
  pybind11::object promised();

  // Waits until a device has been given the work, or it has ended; as torch knows the stream.
  std::optional<c10::Stream> issued_to() const;

  void set_result(pybind11::object result);
  void set_error(pybind11::object error);

  // Says that what it stands for was not done, since the other one has failed or was cancelled;
  // whether it has.
  bool fail_as(const PythonTicket& other);

  // Has a function called without arguments when it has ended. What it raises is written out.
  void add_done_callback(pybind11::object function);

 private:
  void await_end(std::optional<double> timeout_s) const;
  void wait_in_slices(std::optional<double> timeout_s,
                      const std::function<bool(std::chrono::nanoseconds)>& wait_for) const;

  std::shared_ptr<Ticket> ticket_;
  // Counts the execution once it has ended well.
  void note_executed();

  pybind11::object keep_;  // keeps `called_`
  const PythonReplay* called_ = nullptr;
  BoundCall bound_;
  pybind11::object result_;
  bool is_told_ = false;
  bool is_counted_ = false;
};

}  // namespace offload
