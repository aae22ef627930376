// offload's C++ errors as classes of offload.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace offload {

// Sets Python's error. Needs the GIL.
inline void raise_as(const char* class_name, const char* message) {
  const pybind11::object type = pybind11::module_::import("offload.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message);
}

// The Python exception of an error. Needs the GIL.
pybind11::object in_python(const std::exception_ptr& error);

}  // namespace offload
