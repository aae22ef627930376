#include <pybind11/stl.h>

#include "convert.hpp"
#include "registers.hpp"
#include "run/call.hpp"
#include "run/device_storages.hpp"
#include "run/held_storages.hpp"
#include "run/weights.hpp"

namespace py = pybind11;

namespace offload {
namespace {

WeightSpec weight_spec(std::string name, std::size_t slot, std::size_t size_bytes, bool written,
                       const py::list& holders, std::vector<TensorLayout> layouts,
                       std::vector<std::int64_t> offsets, bool packed, py::handle moved) {
  WeightSpec weight;
  weight.name = std::move(name);
  weight.slot = slot;
  weight.size_bytes = size_bytes;
  weight.written = written;
  weight.holders = to_tensors(holders);
  weight.layouts = std::move(layouts);
  weight.offsets = std::move(offsets);
  weight.packed = packed;
  if (!moved.is_none()) weight.moved = to_tensor(moved);
  return weight;
}

std::shared_ptr<HeldStorages> held_storages(const py::list& tensors) {
  StoragePins pins;
  for (const at::Tensor& tensor : to_tensors(tensors)) {
    pins.push_back(StoragePin::of(tensor.storage()));
  }
  return std::make_shared<HeldStorages>(Holder::kExecution, nullptr, std::move(pins));
}

HostConstantSpec host_constant_spec(std::string name, const py::bytes& content, TensorLayout layout,
                                    std::optional<std::size_t> input, const py::object& holder) {
  return {std::move(name), content.cast<std::string>(), std::move(layout), input,
          holder.is_none() ? at::Tensor() : to_tensor(holder)};
}

}  // namespace

void register_call(py::module_& module) {
  module.attr("PLAIN_DEVICE_FORMATS") = py::tuple(py::cast(kPlainFormats));
  py::class_<TensorLayout>(module, "TensorLayout")
      .def(py::init([](std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                       py::handle dtype, bool conjugate, bool negative) {
             return TensorLayout{std::move(shape), std::move(strides), to_dtype(dtype), conjugate,
                                 negative};
           }),
           py::arg("shape"), py::arg("strides"), py::arg("dtype"), py::arg("conjugate"),
           py::arg("negative"));
  py::class_<InputSpec>(module, "InputSpec")
      .def(py::init<std::string, std::size_t, bool, bool, bool, std::size_t, bool, bool>(),
           py::kw_only(), py::arg("name"), py::arg("slot"), py::arg("written"),
           py::arg("may_be_written") = false, py::arg("returned_as_view") = false,
           py::arg("alignment_bytes") = 1, py::arg("copied") = false, py::arg("on_host") = false);
  py::class_<OutputSpec>(module, "OutputSpec")
      .def(py::init<std::string, std::size_t, bool, std::size_t, bool>(), py::kw_only(),
           py::arg("name"), py::arg("slot"), py::arg("operator_allocated"),
           py::arg("alignment_bytes") = 1, py::arg("copied") = false);
  py::enum_<ResultSource>(module, "ResultSource")
      .value("INPUT", ResultSource::kInput)
      .value("WEIGHT", ResultSource::kWeight)
      .value("OUTPUT", ResultSource::kOutput);
  py::class_<ResultSpec>(module, "ResultSpec")
      .def(py::init<ResultSource, std::size_t, bool>(), py::kw_only(), py::arg("source"),
           py::arg("index"), py::arg("is_argument"));
  py::class_<ResultShape>(module, "ResultShape")
      .def(py::init<std::int64_t, TensorLayout, bool>(), py::kw_only(), py::arg("offset_bytes"),
           py::arg("layout"), py::arg("covers_output"));
  py::class_<CallShapes>(module, "CallShapes")
      .def(py::init<std::vector<TensorLayout>, std::vector<std::size_t>, std::vector<ResultShape>,
                    std::size_t>(),
           py::kw_only(), py::arg("inputs"), py::arg("outputs_bytes"), py::arg("results"),
           py::arg("feature_map_bytes"));
  py::class_<WeightSpec>(module, "WeightSpec")
      .def(py::init(&weight_spec), py::kw_only(), py::arg("name"), py::arg("slot"),
           py::arg("size_bytes"), py::arg("written"), py::arg("holders"), py::arg("layouts"),
           py::arg("offsets"), py::arg("packed") = false, py::arg("moved") = py::none());
  module.def(
      "check_memory",
      [](const std::string& name, py::handle tensor) { check_memory(name, to_tensor(tensor)); },
      py::arg("name"), py::arg("tensor"),
      "Refuse a tensor that is not plain, or whose memory was freed or shrunk: BindingError.");
  py::class_<HeldStorages, std::shared_ptr<HeldStorages>>(
      module, "HeldStorages",
      "While it lives, torch refuses to resize the storages of its tensors.")
      .def(py::init(&held_storages), py::arg("tensors"));
  module.def("check_weight", &check_laid_out_as_recorded, py::arg("weight"),
             "Refuse a weight whose tensors are laid out otherwise than recorded: BindingError.");
  py::class_<HostConstantSpec>(module, "HostConstantSpec")
      .def(py::init(&host_constant_spec), py::kw_only(), py::arg("name"), py::arg("content"),
           py::arg("layout"), py::arg("input") = py::none(), py::arg("holder") = py::none());
  py::class_<OverlapSpec>(module, "OverlapSpec")
      .def(py::init<std::size_t, std::size_t, std::int64_t>(), py::kw_only(), py::arg("first"),
           py::arg("second"), py::arg("distance_bytes"));
  py::class_<CallSpec>(module, "CallSpec")
      .def(
          py::init([](const std::string& device, std::vector<InputSpec> inputs,
                      std::vector<OutputSpec> outputs, std::vector<ResultSpec> results,
                      std::vector<WeightSpec> weights, std::vector<OverlapSpec> overlaps,
                      std::size_t feature_map_slot, std::size_t alignment_bytes, CallShapes shapes,
                      std::vector<HostConstantSpec> host_constants, std::string rebinding_refusal) {
            return CallSpec{c10::Device(device),
                            std::move(inputs),
                            std::move(outputs),
                            std::move(results),
                            std::move(weights),
                            std::move(host_constants),
                            std::move(overlaps),
                            feature_map_slot,
                            alignment_bytes,
                            std::move(shapes),
                            std::move(rebinding_refusal),
                            false,
                            {},
                            false,
                            {}};
          }),
          py::kw_only(), py::arg("device"), py::arg("inputs"), py::arg("outputs"),
          py::arg("results"), py::arg("weights"), py::arg("overlaps"), py::arg("feature_map_slot"),
          py::arg("alignment_bytes"), py::arg("shapes"),
          py::arg("host_constants") = std::vector<HostConstantSpec>(),
          py::arg("rebinding_refusal") = std::string());
}

}  // namespace offload
