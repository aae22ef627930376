#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "convert.hpp"
#include "cpu/cpu_resident.hpp"
#include "dispatch/dispatched_resident.hpp"
#include "expression_codes.hpp"
#include "gil.hpp"
#include "registers.hpp"
#include "run/instances.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using Varying = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
using Sizes = std::vector<std::int64_t>;
using Bytes = std::pair<std::string, std::size_t>;

std::vector<VaryingNumber> to_numbers(const Varying& varying) {
  std::vector<VaryingNumber> numbers;
  for (const auto& [position, expression] : varying) numbers.push_back({position, expression});
  return numbers;
}

VaryingView to_view(TensorLayout layout, std::int64_t offset_bytes, const Varying& varying) {
  return {std::move(layout), offset_bytes, to_numbers(varying)};
}

std::vector<VaryingBytes> to_bytes(const std::vector<Bytes>& values) {
  std::vector<VaryingBytes> found;
  for (const auto& [source, number] : values) {
    using Source = VaryingBytes::Source;
    if (source != "fixed" && source != "expression" && source != "input") {
      throw std::invalid_argument("bytes are fixed, of an expression or of an input");
    }
    found.push_back({source == "fixed"        ? Source::kFixed
                     : source == "expression" ? Source::kExpression
                                              : Source::kInput,
                     number});
  }
  return found;
}

// A Python function, called and released under the GIL.
std::shared_ptr<PyObject> held(py::object function) {
  return {function.release().ptr(), [](PyObject* object) {
            if (Py_IsInitialized() == 0) return;
            const GilHeld gil;
            Py_DECREF(object);
          }};
}

std::function<void(const Sizes&)> to_refuse(py::object function) {
  return [function = held(std::move(function))](const Sizes& sizes) {
    const GilHeld gil;
    py::handle(function.get())(sizes);
  };
}

decltype(Instances::Parts::place) to_place(py::object function) {
  return [function = held(std::move(function))](const Sizes& sizes, const Sizes& least,
                                                const Sizes& greatest) {
    const GilHeld gil;
    auto [offsets_bytes, rooms_bytes, feature_map_bytes, is_of_bucket] =
        py::handle(function.get())(sizes, least, greatest)
            .cast<std::tuple<std::vector<std::int64_t>, std::vector<std::size_t>, std::size_t,
                             bool>>();
    return std::pair(
        SizedPlaces{std::move(offsets_bytes), std::move(rooms_bytes), feature_map_bytes},
        is_of_bucket);
  };
}

SizeConstants to_constants(std::shared_ptr<Resident> resident, const std::vector<Bytes>& values,
                           std::vector<std::pair<std::size_t, std::size_t>> results,
                           const py::list& given, const std::optional<SizeConstants>& on_host,
                           const std::string& device) {
  SizeConstants constants{std::move(resident), to_bytes(values), std::move(results), {}, nullptr,
                          c10::Device(device)};
  if (on_host) constants.on_host = std::make_shared<const SizeConstants>(*on_host);
  std::vector<Patch> patches;
  for (const py::handle one : given) {
    const auto pair = py::reinterpret_borrow<py::tuple>(one);
    constants.given.push_back(to_tensor(pair[1]));
    patches.push_back({pair[0].cast<std::uint32_t>(),
                       reinterpret_cast<std::uint64_t>(constants.given.back().storage().data())});
  }
  constants.resident->patch(patches);
  return constants;
}

std::shared_ptr<Instances> make(
    const std::vector<std::tuple<std::int64_t, std::int64_t, Sizes>>& dims,
    const std::vector<Code>& numbers, std::vector<bool> reals, const std::vector<Code>& conditions,
    const std::vector<Sizes>& compared, const std::vector<Bytes>& values,
    std::vector<VaryingView> inputs, std::vector<std::size_t> outputs,
    std::vector<std::pair<VaryingView, std::optional<std::size_t>>> results,
    const std::optional<SizeConstants>& constants, std::shared_ptr<Resident> resident,
    std::size_t budget_bytes, py::object refuse, py::object place) {
  std::vector<SizedDim> sized;
  for (const auto& [minimum, maximum, ends] : dims) sized.push_back({minimum, maximum, ends});
  VaryingCall call{std::move(inputs), std::move(outputs), {}};
  for (auto& [view, alone_on] : results) call.results.push_back({std::move(view), alone_on});
  return std::make_shared<Instances>(Instances::Parts{std::move(sized),
                                                      to_expressions(dims.size(), numbers),
                                                      std::move(reals),
                                                      to_expressions(dims.size(), conditions),
                                                      {compared.begin(), compared.end()},
                                                      to_bytes(values),
                                                      std::move(call),
                                                      constants,
                                                      std::move(resident),
                                                      budget_bytes,
                                                      to_refuse(std::move(refuse)),
                                                      to_place(std::move(place))});
}

template <typename SizedResident>
void set_sizes(
    SizedResident& resident,
    const std::vector<std::tuple<std::size_t, std::size_t, std::vector<std::int64_t>, Varying>>&
        views,
    const std::vector<std::tuple<std::size_t, std::size_t, Varying>>& made,
    const std::vector<
        std::tuple<std::size_t, std::size_t, std::optional<std::size_t>, std::size_t>>& scalars,
    const std::vector<std::pair<std::size_t, std::size_t>>& slots,
    const std::vector<std::pair<std::size_t, std::size_t>>& constants,
    std::optional<std::size_t> feature_map) {
  CpuSizes sizes;
  for (const auto& [tensor, value, numbers, varying] : views) {
    sizes.views.push_back({tensor, value, numbers, to_numbers(varying)});
  }
  for (const auto& [launch, index, varying] : made) {
    sizes.made.push_back({launch, index, to_numbers(varying)});
  }
  for (const auto& [launch, argument, item, expression] : scalars) {
    sizes.scalars.push_back({launch, argument, item, expression});
  }
  for (const auto& [slot, value] : slots) sizes.slots.push_back({slot, value});
  for (const auto& [slot, value] : constants) sizes.constants.push_back({slot, value});
  sizes.feature_map = feature_map;
  resident.set_sizes(std::move(sizes));
}

template <typename SizedResident>
void register_set_sizes(py::module_& module) {
  module.def("set_sizes", &set_sizes<SizedResident>, py::arg("resident"), py::kw_only(),
             py::arg("views"), py::arg("made"), py::arg("scalars"), py::arg("slots"),
             py::arg("constants"), py::arg("feature_map"),
             "Say what of a resident varies with sizes, once all launches are added.");
}

}  // namespace

void register_instances(py::module_& module) {
  py::class_<VaryingView>(module, "VaryingView")
      .def(py::init(&to_view), py::kw_only(), py::arg("layout"), py::arg("offset_bytes"),
           py::arg("varying"));
  py::class_<SizeConstants>(module, "SizeConstants")
      .def(py::init(&to_constants), py::kw_only(), py::arg("resident"), py::arg("values"),
           py::arg("results"), py::arg("given"), py::arg("on_host") = py::none(),
           py::arg("device") = "cpu");
  py::class_<InstanceCounts>(module, "InstanceCounts")
      .def_readonly("n_hits", &InstanceCounts::n_hits)
      .def_readonly("n_misses", &InstanceCounts::n_misses)
      .def_readonly("n_evicted", &InstanceCounts::n_evicted)
      .def_readonly("n_kept", &InstanceCounts::n_kept)
      .def_readonly("kept_bytes", &InstanceCounts::kept_bytes)
      .def_readonly("n_places", &InstanceCounts::n_places);
  py::class_<Instances, std::shared_ptr<Instances>>(module, "Instances")
      .def(py::init(&make), py::kw_only(), py::arg("dims"), py::arg("numbers"), py::arg("reals"),
           py::arg("conditions"), py::arg("compared"), py::arg("values"), py::arg("inputs"),
           py::arg("outputs"), py::arg("results"), py::arg("constants"), py::arg("resident"),
           py::arg("budget_bytes"), py::arg("refuse"), py::arg("place"))
      .def(
          "feature_map_bytes",
          [](Instances& self, const Sizes& sizes) {
            SizesFound found;
            return self.make(sizes, found)->shapes.feature_map_bytes;
          },
          py::arg("sizes"), py::call_guard<GilReleased>())
      .def("clear", &Instances::clear, py::call_guard<GilReleased>())
      .def_property_readonly("counts", &Instances::counts);
  register_set_sizes<CpuResident>(module);
  register_set_sizes<DispatchedResident>(module);
}

}  // namespace offload
