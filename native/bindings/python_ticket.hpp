// Tickets in Python. Everything needs the GIL; waits release it.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>

#include "offload/ticket.hpp"
#include "python_replay.hpp"
#include "run/dependencies.hpp"

namespace offload {

// A ticket with the source of its result: a submitted execution, or an object that is set.
//
// Owner: Python. Errors: those of the work, at each request for its result.
class PythonTicket {
 public:
  PythonTicket() : ticket_(std::make_shared<Ticket>()) {}

  PythonTicket(const PythonTicket&) = delete;
  PythonTicket& operator=(const PythonTicket&) = delete;
  ~PythonTicket();

  // Assigns a submitted execution; `keep` keeps the called replay alive.
  void place(pybind11::object keep, const PythonReplay& called, BoundCall bound);

  // Whether it belongs to an execution whose arguments are known.
  bool is_placed() const { return bound_.call != nullptr; }

  // What an execution of `replay` on `call` must wait for before it may use this ticket's result.
  Dependency as_dependency(const Replay& replay, const Call& call) const;

  const std::shared_ptr<Ticket>& ticket() const { return ticket_; }
  bool cancelled() const;

  // Whether its error was raised to a caller, or will be by the caller of tell.
  bool is_told() const { return is_told_; }
  void tell() { is_told_ = true; }

  // Waits briefly if the latest execution was no longer than that; returns whether it has ended.
  bool wait_soon() const;

  // Waits like `wait`, and returns its error as a Python object; None: it succeeded.
  pybind11::object outcome(std::optional<double> timeout_s) const;

  // Waits until it has ended, at most `timeout_s` seconds, and rethrows its error. Throws Python's
  // TimeoutError after that time; ExecutionError on a thread that must do the work itself.
  void wait(std::optional<double> timeout_s);

  // Waits, and returns the model's result or the object that was set; the same at each call.
  pybind11::object result(std::optional<double> timeout_s);

  // Its result, whose content may not be written yet, for a later execution. Null if it is unknown.
  pybind11::object promised();

  // Waits until the work was given to a device, or has ended; returns the stream in torch's form.
  std::optional<c10::Stream> issued_to() const;

  void set_result(pybind11::object result);
  void set_error(pybind11::object error);

  // Marks its work as not done because the other ticket's work has failed or was cancelled; returns
  // whether that is so.
  bool fail_as(const PythonTicket& other);

  // Calls a function without arguments when it has ended. What the function raises is printed.
  void add_done_callback(pybind11::object function);

 private:
  void await_end(std::optional<double> timeout_s) const;
  void wait_in_slices(std::optional<double> timeout_s,
                      const std::function<bool(std::chrono::nanoseconds)>& wait_for) const;

  std::shared_ptr<Ticket> ticket_;
  // Counts the execution once it has succeeded.
  void note_executed();

  pybind11::object keep_;  // keeps `called_` alive
  const PythonReplay* called_ = nullptr;
  BoundCall bound_;
  pybind11::object result_;
  bool is_told_ = false;
  bool is_counted_ = false;
};

}  // namespace offload
