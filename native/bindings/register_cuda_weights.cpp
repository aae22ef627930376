#include <ATen/ops/from_blob.h>

#include "convert.hpp"
#include "cuda/cuda_weight_stream.hpp"
#include "cuda/link_samples.hpp"
#include "gil.hpp"
#include "registers.hpp"
#include "weight_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using cuda::CudaWeightStream;

std::shared_ptr<CudaWeightStream> make_stream(int device, std::size_t memory_bytes,
                                              std::size_t granule_bytes,
                                              const std::vector<StreamedWeight>& weights,
                                              const std::vector<TransferTuple>& transfers,
                                              std::size_t n_launches, bool shares_store) {
  auto [plan, sources] =
      stream_arguments(memory_bytes, granule_bytes, weights, transfers, n_launches);
  const GilReleased release;
  return {new CudaWeightStream(device, std::move(plan), std::move(sources), shares_store),
          delete_without_gil<CudaWeightStream>};
}

// Bytes at an address of a device, whose memory `keep` keeps alive. `device`: its name in torch.
template <typename Keep>
py::object bytes_at(std::uint64_t address, std::size_t size_bytes, const std::string& device,
                    Keep keep) {
  const at::Device on(device);
  return from_tensor(
      at::for_blob(reinterpret_cast<void*>(address), {static_cast<std::int64_t>(size_bytes)})
          .deleter([keep = std::move(keep)](void*) {})
          .options(at::TensorOptions(at::kByte).device(on))
          .target_device(on)
          .make_tensor());
}

py::object tensor_of(const std::shared_ptr<CudaWeightStream>& stream, std::size_t weight,
                     const std::string& device) {
  check_weight(stream->plan(), weight);
  return bytes_at(stream->address(weight), stream->plan().weights[weight].size_bytes, device,
                  stream);
}

py::object tensor_at(std::uint64_t address, std::size_t size_bytes, const std::string& device) {
  return bytes_at(address, size_bytes, device, nullptr);
}

std::size_t granularity_bytes(int device) {
  const cuda::Driver& driver = cuda::Driver::get();
  const cuda::PrimaryContext context(driver, device);
  return cuda::granularity_bytes(driver, context.device());
}

}  // namespace

void register_cuda_weights(py::module_& module) {
  py::class_<CudaWeightStream, DeviceWeightStream, std::shared_ptr<CudaWeightStream>>(
      module, "CudaWeightStream")
      .def(py::init(&make_stream), py::kw_only(), py::arg("device"), py::arg("memory_bytes"),
           py::arg("granule_bytes"), py::arg("weights"), py::arg("transfers"),
           py::arg("n_launches"), py::arg("shares_store") = true)
      .def("tensor", &tensor_of, py::arg("index"), py::arg("device"));
  module.def("cuda_tensor_at", &tensor_at, py::arg("address"), py::arg("size_bytes"),
             py::arg("device"),
             "The bytes at an address of a device, as a tensor; the memory's owner keeps it.");
  module.def("cuda_granularity_bytes", &granularity_bytes, py::arg("device"),
             py::call_guard<GilReleased>(), "The unit in which memory of the device is mapped.");
  define_held_bytes<CudaWeightStream>(module, "cuda_held_bytes");
  module.def("cuda_link_samples", &cuda::sample_link, py::arg("device"),
             py::call_guard<GilReleased>(),
             "Times in ns of copies from pinned memory of the host, by their bytes.");
}

}  // namespace offload
