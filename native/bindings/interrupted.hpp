// An exception that Python raised during an execution and that is not an error of the execution.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <utility>

namespace offload {

// An interrupt, or what a signal handler raised: it reaches the caller unchanged, whatever error it
// is nested in on the way.
//
// Owner: the handler. Thread: any; it takes the GIL itself.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(pybind11::error_already_set raised) : raised_(std::move(raised)) {}

  const char* what() const noexcept override { return "interrupted"; }
  const pybind11::error_already_set& raised() const { return raised_; }

 private:
  pybind11::error_already_set raised_;
};

}  // namespace offload
