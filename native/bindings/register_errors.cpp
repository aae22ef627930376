#include <torch/csrc/Exceptions.h>

#include <exception>

#include "offload/errors.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

void raise_as(const char* class_name, const char* message) {
  const py::object type = py::module_::import("offload.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message);
}

// What an exception is in Python; none if it is nothing there.
py::object in_python(const std::exception_ptr& pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const py::error_already_set& error) {
    return error.value();
  } catch (const python_error& error) {
    python_error(error).restore();  // a copy, as it may be asked for again
  } catch (...) {
    torch::translate_exception_to_python(pointer);
  }
  return py::error_already_set().value();
}

// Gives the exception that is being raised the one that it was made of as its cause.
void set_cause(const std::exception& error) {
  const auto* const nested = dynamic_cast<const std::nested_exception*>(&error);
  if (nested == nullptr || !nested->nested_ptr()) return;
  py::error_already_set raised;
  PyException_SetCause(raised.value().ptr(), in_python(nested->nested_ptr()).release().ptr());
  raised.restore();
}

}  // namespace

void register_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const BindingError& error) {
      raise_as("BindingError", error.what());
    } catch (const CaptureError& error) {
      raise_as("CaptureError", error.what());
    } catch (const PlanError& error) {
      raise_as("PlanError", error.what());
    } catch (const OutOfMemory& error) {
      raise_as("OutOfMemory", error.what());
      set_cause(error);
    } catch (const OutOfStreams& error) {
      raise_as("OutOfStreams", error.what());
    } catch (const ExecutionError& error) {
      raise_as("ExecutionError", error.what());
      set_cause(error);
    } catch (const FileError& error) {
      raise_as("FileError", error.what());
    } catch (const BackendUnavailable& error) {
      raise_as("BackendUnavailable", error.what());
    }
  });
}

}  // namespace offload
