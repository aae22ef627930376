// One register function for each noun of the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

void register_errors(pybind11::module_& module);
void register_expressions(pybind11::module_& module);
void register_placement(pybind11::module_& module);
void register_streaming(pybind11::module_& module);
void register_tasks(pybind11::module_& module);
void register_call(pybind11::module_& module);
void register_weight_stream(pybind11::module_& module);
void register_instances(pybind11::module_& module);
void register_promotions(pybind11::module_& module);
void register_residents(pybind11::module_& module);
void register_lanes(pybind11::module_& module);
void register_dispatch(pybind11::module_& module);
void register_collectives(pybind11::module_& module);
void register_execution(pybind11::module_& module);
void register_replay(pybind11::module_& module);
void register_segment_dispatcher(pybind11::module_& module);
void register_guards(pybind11::module_& module);
void register_cuda_weights(pybind11::module_& module);
void register_cuda(pybind11::module_& module);
void register_ascend_weights(pybind11::module_& module);
void register_ascend(pybind11::module_& module);
void register_ascend_captured(pybind11::module_& module);
void register_ascend_scheduled(pybind11::module_& module);

}  // namespace offload
