#include <exception>

#include "offload/errors.hpp"
#include "raise_as.hpp"
#include "registers.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_planner, module) {
  module.doc() = "Placement and weight streaming, planned: neither torch nor a device is needed.";
  // Of this module alone: the errors of the other one are more, and have causes.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const offload::PlanError& error) {
      offload::raise_as("PlanError", error.what());
    }
  });
  offload::register_placement(module);
  offload::register_streaming(module);
}
