#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "convert.hpp"
#include "device/captured_stream.hpp"
#include "dispatch/dispatched_resident.hpp"
#include "gil.hpp"
#include "launch_arguments.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

std::shared_ptr<DispatchedResident> make(
    std::vector<CpuSlot> slots, std::vector<CpuTensor> tensors, const std::string& device,
    const std::vector<std::pair<std::size_t, py::object>>& held) {
  std::vector<std::pair<std::size_t, at::Tensor>> tensors_held;
  for (const auto& [slot, object] : held) tensors_held.emplace_back(slot, to_tensor(object));
  const GilReleased release;
  return {new DispatchedResident(std::move(slots), std::move(tensors), c10::Device(device),
                                 tensors_held),
          &delete_without_gil<DispatchedResident>};
}

void add_launch(DispatchedResident& resident, const std::string& operator_name,
                const std::string& overload, const py::tuple& arguments, std::vector<CpuMade> made,
                std::vector<std::size_t> releases, py::handle guard, bool guards_shape,
                const std::string& source) {
  const auto tensor = [&](std::size_t index) { return resident.tensor(index); };
  resident.add(to_launch(tensor, operator_name, overload, arguments, std::move(made),
                         std::move(releases), guard, guards_shape, source));
}

void ask_by_python(const std::string& device_type, py::object ask) {
  auto* const kept = new py::object(std::move(ask));  // the question lives as long as the process
  ask_captures_by(c10::Device(device_type).type(), [kept] {
    const GilHeld gil;
    return (*kept)().cast<bool>();
  });
}

}  // namespace

void register_dispatch(py::module_& module) {
  module.def("ask_captures_by", &ask_by_python, py::arg("device_type"), py::arg("ask"));
  py::class_<DispatchedResident, Resident, std::shared_ptr<DispatchedResident>>(
      module, "DispatchedResident", py::multiple_inheritance())
      .def(py::init(&make), py::arg("slots"), py::arg("tensors"), py::arg("device"),
           py::arg("held"))
      .def("add", &add_launch, py::kw_only(), py::arg("operator_name"), py::arg("overload"),
           py::arg("arguments"), py::arg("made"), py::arg("releases"), py::arg("guard"),
           py::arg("guards_shape"), py::arg("source"))
      .def("require_gradients", &require_gradients<DispatchedResident>, py::arg("tensors"));
}

}  // namespace offload
