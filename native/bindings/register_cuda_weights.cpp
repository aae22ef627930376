#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include "convert.hpp"
#include "cuda/cuda_weight_stream.hpp"
#include "cuda/link_samples.hpp"
#include "registers.hpp"
#include "weight_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using cuda::CudaWeightStream;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::shared_ptr<CudaWeightStream> make_stream(int device, std::size_t memory_bytes,
                                              std::size_t granule_bytes,
                                              const std::vector<StreamedWeight>& weights,
                                              const std::vector<TransferTuple>& transfers,
                                              std::size_t n_launches) {
  auto [plan, sources] =
      stream_arguments(memory_bytes, granule_bytes, weights, transfers, n_launches);
  const py::gil_scoped_release release;
  return {new CudaWeightStream(device, std::move(plan), std::move(sources)),
          delete_without_gil<CudaWeightStream>};
}

// `device`: what torch calls the device that the memory is on.
py::object tensor_of(const std::shared_ptr<CudaWeightStream>& stream, std::size_t weight,
                     const std::string& device) {
  check_weight(stream->plan(), weight);
  const auto size_bytes = static_cast<std::int64_t>(stream->plan().weights[weight].size_bytes);
  const at::Device on(device);
  return from_tensor(at::for_blob(reinterpret_cast<void*>(stream->address(weight)), {size_bytes})
                         .deleter([stream](void*) {})
                         .options(at::TensorOptions(at::kByte).device(on))
                         .target_device(on)
                         .make_tensor());
}

void refresh(CudaWeightStream& stream, std::optional<std::vector<std::size_t>> weights) {
  if (!weights) {
    weights.emplace(stream.plan().weights.size());
    for (std::size_t index = 0; index < weights->size(); ++index) (*weights)[index] = index;
  }
  const py::gil_scoped_release release;
  stream.refresh(*weights);
}

void replace(CudaWeightStream& stream, std::size_t weight, py::handle source) {
  check_weight(stream.plan(), weight);
  WeightFiles files;
  std::shared_ptr<WeightSource> made = make_source(stream.plan().weights[weight], source, files);
  const py::gil_scoped_release release;
  stream.replace(weight, std::move(made));
}

std::vector<std::string> read_modes(const CudaWeightStream& stream) {
  const py::gil_scoped_release release;
  std::vector<std::string> names;
  for (std::size_t weight = 0; weight < stream.plan().weights.size(); ++weight) {
    names.emplace_back(mode_name(stream.mode(weight)));
  }
  return names;
}

}  // namespace

void register_cuda_weights(py::module_& module) {
  py::class_<CudaWeightStream, std::shared_ptr<CudaWeightStream>>(module, "CudaWeightStream")
      .def(py::init(&make_stream), py::kw_only(), py::arg("device"), py::arg("memory_bytes"),
           py::arg("granule_bytes"), py::arg("weights"), py::arg("transfers"),
           py::arg("n_launches"))
      .def("load", &CudaWeightStream::load, Unlocked())
      .def("tensor", &tensor_of, py::arg("index"), py::arg("device"))
      .def("refresh", &refresh, py::arg("weights") = py::none())
      .def("replace", &replace, py::arg("index"), py::arg("source"))
      .def("close", &CudaWeightStream::close, Unlocked())
      .def_property_readonly("read_modes", &read_modes)
      .def_property_readonly("bytes_moved", &CudaWeightStream::bytes_moved)
      .def_property_readonly("wait_ns", [](const CudaWeightStream&) { return 0; })
      .def_property_readonly("generation", &CudaWeightStream::generation);
  module.def("cuda_link_samples", &cuda::sample_link, py::arg("device"), Unlocked(),
             "Times in ns of copies from pinned memory of the host, by their bytes.");
}

}  // namespace offload
