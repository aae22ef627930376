// What Python raised in a ticket's work, for those that request its result.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <utility>

#include "gil.hpp"

namespace offload {

// A Python exception. Unlike pybind11's error it can be raised any number of times.
//
// Owner: the ticket. Thread: any; `value` needs the GIL, and destruction takes it.
class RaisedInPython : public std::exception {
 public:
  explicit RaisedInPython(pybind11::object value)
      : value_(new pybind11::object(std::move(value)), [](pybind11::object* one) {
          const GilHeld held;
          delete one;
        }) {}

  const char* what() const noexcept override { return "raised in Python"; }
  const pybind11::object& value() const { return *value_; }

 private:
  std::shared_ptr<pybind11::object> value_;
};

}  // namespace offload
