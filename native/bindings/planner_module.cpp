#include <exception>

#include "offload/errors.hpp"
#include "offload/expressions.hpp"
#include "raise_as.hpp"
#include "registers.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_planner, module) {
  module.doc() = "What is planned and computed of sizes: neither torch nor a device is needed.";
  // For this module alone: the other module has more errors, which have causes.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const offload::PlanError& error) {
      offload::raise_as("PlanError", error.what());
    } catch (const offload::ExpressionError& error) {
      offload::raise_as("BindingError", error.what());
    }
  });
  offload::register_placement(module);
  offload::register_streaming(module);
  offload::register_tasks(module);
  offload::register_expressions(module);
}
