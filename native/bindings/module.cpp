#include <torch/version.h>

#include "registers.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled part of offload: headers, residents and replay.";
  module.attr("torch_version") = TORCH_VERSION;  // the version it was compiled against
  offload::register_errors(module);
  offload::register_call(module);
  offload::register_weight_stream(module);
  offload::register_residents(module);
  offload::register_lanes(module);
  offload::register_dispatch(module);
  offload::register_collectives(module);
  offload::register_instances(module);
  offload::register_promotions(module);
  offload::register_execution(module);
  offload::register_replay(module);
  offload::register_segment_dispatcher(module);
  offload::register_guards(module);
  offload::register_cuda_weights(module);
  offload::register_cuda(module);
  offload::register_ascend_weights(module);
  offload::register_ascend(module);
  offload::register_ascend_captured(module);
  offload::register_ascend_scheduled(module);
}
