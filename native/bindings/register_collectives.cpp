#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "convert.hpp"
#include "cpu/collectives.hpp"
#include "cpu/cpu_resident.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Adds a collective to a resident's launches and returns it, for the launches that wait for it.
std::shared_ptr<Collective> add_start(CpuResident& resident, const std::string& operator_name,
                                      const py::tuple& arguments,
                                      const std::vector<std::size_t>& outputs,
                                      std::vector<std::size_t> releases,
                                      const std::string& source) {
  const auto found = c10::Dispatcher::singleton().findSchema({operator_name, ""});
  if (!found || found->schema().arguments().size() != arguments.size()) {
    throw std::invalid_argument("operator " + operator_name + " with " +
                                std::to_string(arguments.size()) +
                                " arguments does not exist in this torch");
  }
  const FindTensor find_tensor = [&](py::handle object) {
    return resident.tensor(object.attr("index").cast<std::size_t>());
  };
  std::vector<c10::IValue> values;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    const py::handle object = arguments[index];
    if (py::isinstance<py::str>(object)) {  // the group, which torch 2.13 declares as any type
      values.emplace_back(object.cast<std::string>());
    } else {
      values.push_back(to_ivalue(object, found->schema().arguments()[index].real_type(),
                                 std::nullopt, find_tensor));
    }
  }
  CpuLaunch launch;
  launch.operator_name = operator_name;
  launch.source = source;
  launch.releases = std::move(releases);
  launch.mode = CpuMode::kStart;
  for (const std::size_t output : outputs) launch.outputs.push_back(resident.tensor(output));
  const std::size_t prefix = operator_name.rfind(':') + 1;
  launch.collective = make_collective(operator_name.substr(prefix), values, launch.outputs);
  std::shared_ptr<Collective> started = launch.collective;
  resident.add(std::move(launch));
  return started;
}

void add_wait(CpuResident& resident, std::shared_ptr<Collective> collective,
              std::vector<std::size_t> releases, const std::string& source) {
  CpuLaunch launch;
  launch.operator_name = "_c10d_functional::wait_tensor";
  launch.source = source;
  launch.releases = std::move(releases);
  launch.mode = CpuMode::kWait;
  launch.collective = std::move(collective);
  resident.add(std::move(launch));
}

}  // namespace

void register_collectives(py::module_& module) {
  py::class_<Collective, std::shared_ptr<Collective>>(module, "Collective");  // NOLINT
  module.def("add_start", &add_start, py::arg("resident"), py::kw_only(), py::arg("operator_name"),
             py::arg("arguments"), py::arg("outputs"), py::arg("releases"), py::arg("source"),
             "Adds a launch that starts a collective; gives it, for launches that wait for it.");
  module.def("add_wait", &add_wait, py::arg("resident"), py::kw_only(), py::arg("collective"),
             py::arg("releases"), py::arg("source"), "Adds a launch that waits for a collective.");
  module.def(
      "reduce_op_name",
      [](const py::object& boxed) {
        const auto type = torch::getCustomClass("__torch__.torch.classes.c10d.ReduceOp");
        return reduce_op_name(torch::jit::toIValue(boxed, type));
      },
      py::arg("boxed"), "What a boxed ReduceOp is called in functional collectives.");
}

}  // namespace offload
