#include "registers.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled part of offload: placement, headers, residents and replay.";
  offload::register_errors(module);
  offload::register_placement(module);
  offload::register_call(module);
  offload::register_residents(module);
  offload::register_replay(module);
}
