#include "offload/errors.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

void raise_as(const char* class_name, const char* message) {
  const py::object type = py::module_::import("offload.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message);
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
    } catch (const OutOfStreams& error) {
      raise_as("OutOfStreams", error.what());
    } catch (const ExecutionError& error) {
      raise_as("ExecutionError", error.what());
    } catch (const FileError& error) {
      raise_as("FileError", error.what());
    } catch (const BackendUnavailable& error) {
      raise_as("BackendUnavailable", error.what());
    }
  });
}

}  // namespace offload
