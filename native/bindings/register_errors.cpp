#include <torch/csrc/Exceptions.h>

#include <exception>

#include "interrupted.hpp"
#include "offload/errors.hpp"
#include "raise_as.hpp"
#include "raised_in_python.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

bool is_interrupt(const std::exception_ptr& pointer, const py::object& found) {
  if (PyErr_GivenExceptionMatches(found.ptr(), PyExc_Exception) == 0) return true;
  try {
    std::rethrow_exception(pointer);
  } catch (const Interrupted&) {
    return true;
  } catch (...) {
    return false;
  }
}

void raise_object(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

// Raises an error with its nested exception as the cause, or the nested exception itself if it is a
// Python interrupt.
void raise_of_cause(const char* class_name, const std::exception& error) {
  const auto* const nested = dynamic_cast<const std::nested_exception*>(&error);
  if (nested == nullptr || !nested->nested_ptr()) return raise_as(class_name, error.what());
  py::object cause = in_python(nested->nested_ptr());
  if (is_interrupt(nested->nested_ptr(), cause)) {
    return raise_object(cause);
  }
  raise_as(class_name, error.what());
  py::error_already_set raised;
  PyException_SetCause(raised.value().ptr(), cause.release().ptr());
  raised.restore();
}

// Sets Python's error if it is one of offload's; returns whether it is.
bool raise_ours(const std::exception_ptr& pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const BindingError& error) {
    raise_as("BindingError", error.what());
  } catch (const CaptureError& error) {
    raise_as("CaptureError", error.what());
  } catch (const PlanError& error) {
    raise_as("PlanError", error.what());
  } catch (const DependencyError& error) {
    raise_of_cause("DependencyError", error);
  } catch (const CancelledError& error) {
    const py::object type = py::module_::import("concurrent.futures").attr("CancelledError");
    PyErr_SetString(type.ptr(), error.what());
  } catch (const RaisedInPython& error) {
    raise_object(error.value());
  } catch (const OutOfMemory& error) {
    raise_of_cause("OutOfMemory", error);
  } catch (const OutOfStreams& error) {
    raise_as("OutOfStreams", error.what());
  } catch (const ExecutionError& error) {
    raise_of_cause("ExecutionError", error);
  } catch (const FileError& error) {
    raise_as("FileError", error.what());
  } catch (const BackendUnavailable& error) {
    raise_as("BackendUnavailable", error.what());
  } catch (...) {
    return false;
  }
  return true;
}

}  // namespace

py::object in_python(const std::exception_ptr& pointer) {
  if (raise_ours(pointer)) return py::error_already_set().value();
  try {
    std::rethrow_exception(pointer);
  } catch (const py::error_already_set& error) {
    return error.value();
  } catch (const Interrupted& error) {
    return error.raised().value();
  } catch (const python_error& error) {
    python_error(error).restore();  // a copy, as it may be requested again
  } catch (...) {
    torch::translate_exception_to_python(pointer);
  }
  return py::error_already_set().value();
}

void register_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    if (pointer && !raise_ours(pointer)) std::rethrow_exception(pointer);
  });
}

}  // namespace offload
