// Streamed weights in Python's description.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "streaming/host_store.hpp"
#include "streaming/stream_plan.hpp"
#include "streaming/weight_source.hpp"

namespace offload {

// The place of a weight's bytes in a file; they are as many as the weight has.
struct FileRange {
  std::string path;
  std::size_t offset_bytes = 0;
};

// A weight, and the FileRange or tensor with its bytes.
struct StreamedWeight {
  WeightPlacement placement;
  pybind11::object source;
};

// (weight, piece, first launch, last launch, after launch, after pass)
using TransferTuple =
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, int>;

// Throws FileError and BindingError naming the weight. Needs the GIL.
std::shared_ptr<WeightSource> make_source(const WeightPlacement& weight, pybind11::handle source,
                                          WeightFiles& files);

// The plan, and the sources by weight. Errors and GIL: as make_source.
std::pair<StreamPlan, std::vector<std::shared_ptr<WeightSource>>> stream_arguments(
    std::size_t memory_bytes, std::size_t granule_bytes, const std::vector<StreamedWeight>& weights,
    const std::vector<TransferTuple>& transfers, std::size_t n_launches);

// (path, offset, bytes)
using StoredRange = std::tuple<std::string, std::size_t, std::size_t>;

// Bytes of these ranges that the host store has for a device, of the files now at the paths. A
// missing file is not an error. Without the GIL.
std::size_t held_bytes(const StoreDevice& device, const std::vector<StoredRange>& ranges);

// Defines the function that queries the host store from which a device's `Stream`s copy.
template <class Stream>
void define_held_bytes(pybind11::module_& module, const char* name) {
  module.def(
      name,
      [](int device, const std::vector<StoredRange>& ranges) {
        return held_bytes(Stream::store_device(device), ranges);
      },
      pybind11::arg("device"), pybind11::arg("ranges"), pybind11::call_guard<GilReleased>(),
      "How many bytes of these ranges the host store of a device has.");
}

// "memory", "direct" or "buffered".
const char* mode_name(ReadMode mode);

// The common methods of weight streams, for any memory.
template <typename Stream, typename Class>
void define_weight_stream(Class& definition) {
  namespace py = pybind11;
  using Unlocked = py::call_guard<GilReleased>;
  definition
      .def(
          "load",
          [](Stream& stream, const std::function<void(std::uint64_t)>& progress) {
            const GilReleased release;
            stream.load(progress);
          },
          py::arg("progress") = nullptr)
      .def(
          "refresh",
          [](Stream& stream, std::optional<std::vector<std::size_t>> weights) {
            if (!weights) {
              weights.emplace(stream.plan().weights.size());
              for (std::size_t index = 0; index < weights->size(); ++index) {
                (*weights)[index] = index;
              }
            }
            const GilReleased release;
            stream.refresh(*weights);
          },
          py::arg("weights") = py::none())
      .def(
          "replace",  // all of them or, if one of them is refused, none
          [](Stream& stream, const std::map<std::size_t, py::object>& sources) {
            WeightFiles files;
            std::map<std::size_t, std::shared_ptr<WeightSource>> made;
            for (const auto& [weight, source] : sources) {
              check_weight(stream.plan(), weight);
              made[weight] = make_source(stream.plan().weights[weight], source, files);
            }
            const GilReleased release;
            stream.replace(std::move(made));
          },
          py::arg("sources"))
      .def("close", &Stream::close, Unlocked())
      .def("give_back", &Stream::give_back, Unlocked())
      .def_property_readonly("read_modes",
                             [](const Stream& stream) {
                               const GilReleased release;
                               std::vector<std::string> names;
                               for (std::size_t weight = 0; weight < stream.plan().weights.size();
                                    ++weight) {
                                 names.emplace_back(mode_name(stream.mode(weight)));
                               }
                               return names;
                             })
      .def_property_readonly(
          "store_bytes",
          [](const Stream& stream) {
            const GilReleased release;
            return stream.store_bytes();
          },
          "Bytes of the host store that are used; None: it has none.")
      .def_property_readonly(
          "shared_store_bytes",
          [](const Stream& stream) {
            const GilReleased release;
            return stream.shared_store_bytes();
          },
          "Those that other executables use too.")
      .def_property_readonly("wait_ns", &Stream::wait_ns)
      .def_property_readonly("discarded_bytes", &Stream::discarded_bytes)
      .def_property_readonly("load_bytes", &Stream::load_bytes)
      .def_property_readonly("bytes_moved", &Stream::bytes_moved)
      .def_property_readonly("n_transfers", &Stream::n_transfers)
      .def_property_readonly("generation", &Stream::generation);
}

}  // namespace offload
