#include <ATen/ops/from_blob.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "convert.hpp"
#include "offload/errors.hpp"
#include "registers.hpp"
#include "replay/tensor_source.hpp"
#include "streaming/weight_stream.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Where a weight's bytes begin in a file; they are as many as the weight has.
struct FileRange {
  std::string path;
  std::size_t offset_bytes = 0;
};

using Piece = std::tuple<std::size_t, std::size_t, std::size_t, bool>;
using Transfer = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, int>;

// A weight, and what its bytes come from: a FileRange, a tensor of bytes that do not change, or a
// list of the model's tensors, whose changes are seen.
struct StreamedWeight {
  WeightPlacement placement;
  py::object source;
};

StreamedWeight streamed_weight(std::string name, std::size_t size_bytes,
                               const std::vector<Piece>& pieces, py::object source, bool gathered) {
  StreamedWeight weight{{std::move(name), size_bytes, {}, gathered}, std::move(source)};
  for (const auto& [offset_bytes, piece_bytes, memory_offset_bytes, streamed] : pieces) {
    weight.placement.pieces.push_back({offset_bytes, piece_bytes, memory_offset_bytes, streamed});
  }
  return weight;
}

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
                       c10::toString(tensor.scalar_type()) + " on " + tensor.device().str());
  }
  std::shared_ptr<const std::byte> memory(
      static_cast<const std::byte*>(tensor.const_data_ptr()),
      [storage = tensor.storage()](const std::byte*) mutable { storage = c10::Storage(); });
  return std::make_shared<HeldSource>(std::move(memory), tensor.nbytes());
}

std::shared_ptr<WeightStream> make_stream(std::size_t memory_bytes, std::size_t granule_bytes,
                                          const std::vector<StreamedWeight>& weights,
                                          const std::vector<Transfer>& transfers,
                                          std::size_t n_launches, bool poison) {
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
  const py::gil_scoped_release release;
  return {new WeightStream(std::move(plan), std::move(sources), poison),
          delete_without_gil<WeightStream>};
}

void load(WeightStream& stream, const std::function<void(std::uint64_t)>& progress) {
  const py::gil_scoped_release release;
  stream.load(progress);
}

py::object tensor_of(const std::shared_ptr<WeightStream>& stream, std::size_t weight) {
  check_weight(stream->plan(), weight);
  const auto size_bytes = static_cast<std::int64_t>(stream->plan().weights[weight].size_bytes);
  return from_tensor(at::from_blob(
      stream->address(weight), {size_bytes}, [stream](void*) {}, at::TensorOptions(at::kByte)));
}

void refresh(WeightStream& stream, std::optional<std::vector<std::size_t>> weights) {
  if (!weights) {
    weights.emplace(stream.plan().weights.size());
    for (std::size_t index = 0; index < weights->size(); ++index) (*weights)[index] = index;
  }
  const py::gil_scoped_release release;
  stream.refresh(*weights);
}

// All of them or, if one of them is refused, none.
void replace(WeightStream& stream, const std::map<std::size_t, py::object>& sources) {
  WeightFiles files;
  std::map<std::size_t, std::shared_ptr<WeightSource>> made;
  for (const auto& [weight, source] : sources) {
    check_weight(stream.plan(), weight);
    made[weight] = make_source(stream.plan().weights[weight], source, files);
  }
  const py::gil_scoped_release release;
  stream.replace(std::move(made));
}

std::vector<std::string> read_modes(const WeightStream& stream) {
  const py::gil_scoped_release release;
  std::vector<std::string> names;
  for (std::size_t weight = 0; weight < stream.plan().weights.size(); ++weight) {
    const ReadMode mode = stream.mode(weight);
    names.emplace_back(mode == ReadMode::kMemory   ? "memory"
                       : mode == ReadMode::kDirect ? "direct"
                                                   : "buffered");
  }
  return names;
}

}  // namespace

void register_weight_stream(py::module_& module) {
  py::class_<FileRange>(module, "FileRange")
      .def(py::init<std::string, std::size_t>(), py::arg("path"), py::arg("offset_bytes"));
  py::class_<StreamedWeight>(module, "StreamedWeight")
      .def(py::init(&streamed_weight), py::kw_only(), py::arg("name"), py::arg("size_bytes"),
           py::arg("pieces"), py::arg("source"), py::arg("gathered") = false);
  py::class_<WeightStream, std::shared_ptr<WeightStream>>(module, "WeightStream")
      .def(py::init(&make_stream), py::kw_only(), py::arg("memory_bytes"), py::arg("granule_bytes"),
           py::arg("weights"), py::arg("transfers"), py::arg("n_launches"),
           py::arg("poison") = false)
      .def("load", &load, py::arg("progress") = nullptr)
      .def("tensor", &tensor_of, py::arg("index"))
      .def("refresh", &refresh, py::arg("weights") = py::none())
      .def("replace", &replace, py::arg("sources"))
      .def("close", &WeightStream::close, py::call_guard<py::gil_scoped_release>())
      .def("give_back", &WeightStream::give_back, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("read_modes", &read_modes)
      .def_property_readonly("bytes_moved", &WeightStream::bytes_moved)
      .def_property_readonly("n_transfers", &WeightStream::n_transfers)
      .def_property_readonly("wait_ns", &WeightStream::wait_ns)
      .def_property_readonly("busy_ns", &WeightStream::busy_ns)
      .def_property_readonly("generation", &WeightStream::generation);
}

}  // namespace offload
