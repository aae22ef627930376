#include <ATen/ops/from_blob.h>

#include <tuple>

#include "convert.hpp"
#include "gil.hpp"
#include "offload/dtype_name.hpp"
#include "offload/errors.hpp"
#include "registers.hpp"
#include "run/tensor_source.hpp"
#include "streaming/device_weight_stream.hpp"
#include "streaming/weight_stream.hpp"
#include "weight_arguments.hpp"

namespace py = pybind11;

namespace offload {

std::shared_ptr<WeightSource> make_source(const WeightPlacement& weight, py::handle source,
                                          WeightFiles& files) {
  if (py::isinstance<FileRange>(source)) {
    const auto& range = source.cast<const FileRange&>();
    try {
      return std::make_shared<FileSource>(files.open(range.path), range.offset_bytes,
                                          weight.size_bytes);
    } catch (const FileError& error) {
      throw FileError(weight.name + ": " + error.what());
    }
  }
  if (py::isinstance<py::list>(source)) {
    try {
      return std::make_shared<TensorSource>(to_tensors(source), weight.size_bytes);
    } catch (const BindingError& error) {
      throw BindingError(weight.name + ": " + error.what());
    }
  }
  const at::Tensor tensor = to_tensor(source);
  if (tensor.scalar_type() != c10::ScalarType::Byte || !tensor.is_contiguous() ||
      !tensor.device().is_cpu()) {
    throw BindingError(weight.name + ": expected a contiguous uint8 tensor on the CPU, got " +
                       dtype_name(tensor.scalar_type()) + " on " + tensor.device().str());
  }
  std::shared_ptr<const std::byte> memory(
      static_cast<const std::byte*>(tensor.const_data_ptr()),
      [storage = tensor.storage()](const std::byte*) mutable { storage = c10::Storage(); });
  return std::make_shared<HeldSource>(std::move(memory), tensor.nbytes());
}

std::pair<StreamPlan, std::vector<std::shared_ptr<WeightSource>>> stream_arguments(
    std::size_t memory_bytes, std::size_t granule_bytes, const std::vector<StreamedWeight>& weights,
    const std::vector<TransferTuple>& transfers, std::size_t n_launches) {
  StreamPlan plan;
  plan.memory_bytes = memory_bytes;
  plan.granule_bytes = granule_bytes;
  plan.n_launches = n_launches;
  std::vector<std::shared_ptr<WeightSource>> sources;
  WeightFiles files;
  for (const StreamedWeight& weight : weights) {
    plan.weights.push_back(weight.placement);
    sources.push_back(make_source(weight.placement, weight.source, files));
  }
  for (const auto& [weight, piece, first, last, after, pass] : transfers) {
    plan.transfers.push_back({weight, piece, first, last, after, pass});
  }
  return {std::move(plan), std::move(sources)};
}

std::size_t held_bytes(const StoreDevice& device, const std::vector<StoredRange>& ranges) {
  std::size_t n_bytes = 0;
  for (const auto& [path, offset_bytes, size_bytes] : ranges) {
    struct stat status{};
    if (stat(path.c_str(), &status) != 0) continue;
    const StoreKey key{device, FileIdentity::of(status)};
    n_bytes += HostStore::of_process().held_bytes(key, offset_bytes, size_bytes);
  }
  return n_bytes;
}

const char* mode_name(ReadMode mode) {
  if (mode == ReadMode::kMemory) return "memory";
  return mode == ReadMode::kDirect ? "direct" : "buffered";
}

namespace {

using Piece = std::tuple<std::size_t, std::size_t, std::size_t, bool>;

StreamedWeight streamed_weight(std::string name, std::size_t size_bytes,
                               const std::vector<Piece>& pieces, py::object source, bool gathered) {
  StreamedWeight weight{{std::move(name), size_bytes, {}, gathered}, std::move(source)};
  for (const auto& [offset_bytes, piece_bytes, memory_offset_bytes, streamed] : pieces) {
    weight.placement.pieces.push_back({offset_bytes, piece_bytes, memory_offset_bytes, streamed});
  }
  return weight;
}

std::shared_ptr<WeightStream> make_stream(std::size_t memory_bytes, std::size_t granule_bytes,
                                          const std::vector<StreamedWeight>& weights,
                                          const std::vector<TransferTuple>& transfers,
                                          std::size_t n_launches, bool poison) {
  auto [plan, sources] =
      stream_arguments(memory_bytes, granule_bytes, weights, transfers, n_launches);
  const GilReleased release;
  return {new WeightStream(std::move(plan), std::move(sources), poison),
          delete_without_gil<WeightStream>};
}

py::object tensor_of(const std::shared_ptr<WeightStream>& stream, std::size_t weight) {
  check_weight(stream->plan(), weight);
  const auto size_bytes = static_cast<std::int64_t>(stream->plan().weights[weight].size_bytes);
  return from_tensor(at::from_blob(
      stream->address(weight), {size_bytes}, [stream](void*) {}, at::TensorOptions(at::kByte)));
}

}  // namespace

void register_weight_stream(py::module_& module) {
  py::class_<FileRange>(module, "FileRange")
      .def(py::init<std::string, std::size_t>(), py::arg("path"), py::arg("offset_bytes"));
  py::class_<StreamedWeight>(module, "StreamedWeight")
      .def(py::init(&streamed_weight), py::kw_only(), py::arg("name"), py::arg("size_bytes"),
           py::arg("pieces"), py::arg("source"), py::arg("gathered") = false);
  py::class_<WeightStream, std::shared_ptr<WeightStream>> stream(module, "WeightStream");
  stream
      .def(py::init(&make_stream), py::kw_only(), py::arg("memory_bytes"), py::arg("granule_bytes"),
           py::arg("weights"), py::arg("transfers"), py::arg("n_launches"),
           py::arg("poison") = false)
      .def("tensor", &tensor_of, py::arg("index"));
  define_weight_stream<WeightStream>(stream);
  stream.def_property_readonly("busy_ns", &WeightStream::busy_ns);
  py::class_<DeviceWeightStream, std::shared_ptr<DeviceWeightStream>> on_device(
      module, "DeviceWeightStream");
  define_weight_stream<DeviceWeightStream>(on_device);
  on_device.def("forget_transfers", &DeviceWeightStream::forget_transfers,
                "Count bytes moved and transfers from here on.");
}

}  // namespace offload
