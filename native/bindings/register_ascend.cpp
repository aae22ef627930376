#include <pybind11/stl.h>

#include <string_view>
#include <tuple>
#include <variant>

#include "ascend/ascend_resident.hpp"
#include "ascend/gather_operators.hpp"
#include "ascend/kernel_binary.hpp"
#include "ascend/offline_model.hpp"
#include "convert.hpp"
#include "gil.hpp"
#include "method_of.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using acl::AscendResident;
using acl::KernelBinary;
using acl::ModelForm;
using acl::OfflineResident;
using acl::Runtime;

int device_count() {
  const Runtime& runtime = Runtime::get();
  std::uint32_t count = 0;
  runtime.check(runtime.get_device_count(&count), "counting devices");
  return static_cast<int>(count);
}

// The name of the chip, and the total and free bytes of the device's own memory.
std::tuple<std::string, std::size_t, std::size_t> device(int index) {
  const Runtime& runtime = Runtime::get();
  const acl::Device found(runtime, index);
  const acl::ContextScope scope(runtime, found);
  const char* const name = runtime.get_soc_name();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  runtime.check(runtime.get_memory_info(acl::kMemoryHbm, &free_bytes, &total_bytes),
                "asking for the device's memory");
  return {name == nullptr ? "unknown" : name, total_bytes, free_bytes};
}

py::dict capabilities() {
  py::dict found;
  for (const auto& [name, has] : Runtime::get().capabilities()) found[py::str(name)] = has;
  return found;
}

const char* form_name(ModelForm form) { return form == ModelForm::kBuild ? "build" : "capture"; }

std::optional<ModelForm> to_form(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  if (*name == "build") return ModelForm::kBuild;
  if (*name == "capture") return ModelForm::kCapture;
  throw std::invalid_argument("a model is made by 'build' or 'capture', got '" + *name + "'");
}

// (function, blocks on the device), or "operators".
using GatherWay = std::variant<std::pair<std::uint64_t, std::uint32_t>, std::string>;

acl::RefreshWay to_refresh(const std::optional<GatherWay>& gather) {
  if (!gather) return acl::WrittenByHost();
  if (const auto* const name = std::get_if<std::string>(&*gather)) {
    if (*name == "operators") return acl::GatheredByOperators();
    throw std::invalid_argument("a gather is made by a kernel or by 'operators', got '" + *name +
                                "'");
  }
  const auto& [function, n_blocks] = std::get<std::pair<std::uint64_t, std::uint32_t>>(*gather);
  return acl::GatherKernel{to_handle<acl::Function>(function), n_blocks};
}

// (function, blocks on the device, launch, argument block)
using KernelTuple = std::tuple<std::uint64_t, std::uint32_t, std::size_t, py::bytes>;

std::shared_ptr<AscendResident> make_resident(
    int device_index, std::size_t arena_bytes, const std::vector<KernelTuple>& kernels,
    const std::vector<std::pair<std::uint32_t, std::size_t>>& words,
    const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>>& relocations,
    std::vector<Trigger> triggers, std::size_t n_launches, const std::optional<std::string>& form,
    bool copies_on_device, const std::optional<GatherWay>& gather,
    std::shared_ptr<acl::StreamedSteps> steps, std::vector<std::size_t> for_next_pass,
    const std::vector<std::tuple<std::uint32_t, std::size_t, std::uint64_t>>& own_addresses,
    py::object keep) {
  acl::AscendProgram program;
  program.device = device_index;
  program.arena_bytes = arena_bytes;
  for (const auto& [function, n_blocks, launch, arguments] : kernels) {
    program.kernels.push_back({to_handle<acl::Function>(function), n_blocks, launch});
    const auto bytes = static_cast<std::string_view>(arguments);
    program.table.blocks.emplace_back(bytes.begin(), bytes.end());
  }
  for (const auto& [block, offset_bytes] : words) {
    program.table.words.push_back({block, offset_bytes});
  }
  for (const auto& [word, slot, offset_bytes] : relocations) {
    program.table.relocations.push_back({word, slot, offset_bytes});
  }
  for (const auto& [block, offset_bytes, target_bytes] : own_addresses) {
    program.table.own.push_back({{block, offset_bytes}, target_bytes});
  }
  program.table.triggers = std::move(triggers);
  program.n_launches = n_launches;
  program.form = to_form(form);
  program.copies_on_device = copies_on_device;
  program.steps = std::move(steps);
  program.for_next_pass = std::move(for_next_pass);
  program.refresh = to_refresh(gather);
  return {new AscendResident(std::move(program)), DeleteResident<AscendResident>(std::move(keep))};
}

py::dict refresh_counts(const AscendResident& resident) {
  const acl::RefreshCounts counts = resident.counts();
  py::dict found;
  found["copies"] = counts.copies;
  found["bytes_copied"] = counts.bytes_copied;
  found["gathers"] = counts.gathers;
  found["bytes_launched"] = counts.bytes_launched;
  found["plans"] = counts.plans;
  return found;
}

// (name, data type, shape, bytes, format) of each.
py::list described(const std::vector<acl::OfflineTensor>& tensors) {
  py::list found;
  for (const acl::OfflineTensor& one : tensors) {
    found.append(py::make_tuple(one.name, static_cast<int>(one.type),
                                py::tuple(py::cast(one.shape)), one.size_bytes,
                                static_cast<int>(one.format)));
  }
  return found;
}

void register_offline(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  py::class_<OfflineResident, Resident, std::shared_ptr<OfflineResident>>(
      module, "AscendOfflineModel", py::multiple_inheritance())
      .def(py::init([](int index, const std::string& path, bool copies_on_device) {
             const GilReleased release;
             return std::shared_ptr<OfflineResident>(
                 new OfflineResident(index, path, copies_on_device),
                 delete_without_gil<OfflineResident>);
           }),
           py::kw_only(), py::arg("device"), py::arg("path"), py::arg("copies_on_device") = true)
      .def_property_readonly("inputs",
                             [](const OfflineResident& one) { return described(one.inputs()); })
      .def_property_readonly("outputs",
                             [](const OfflineResident& one) { return described(one.outputs()); })
      .def_property_readonly("work_bytes", &OfflineResident::work_bytes)
      .def_property_readonly("weight_bytes", &OfflineResident::weight_bytes)
      .def_property_readonly("n_updates", &OfflineResident::n_updates)
      .def("patch", &patch_words<OfflineResident>, py::arg("words"))
      .def("set_stream", &OfflineResident::set_stream, py::arg("stream"), Unlocked())
      .def("execute", &execute_resident<OfflineResident>, Unlocked())
      .def("finish", &OfflineResident::finish, Unlocked())
      .def("close", method_of<OfflineResident, &OfflineResident::close>, Unlocked());
}

void register_resident(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  py::class_<AscendResident, Resident, std::shared_ptr<AscendResident>>(module, "AscendResident",
                                                                        py::multiple_inheritance())
      .def(py::init(&make_resident), py::kw_only(), py::arg("device"), py::arg("arena_bytes"),
           py::arg("kernels"), py::arg("words"), py::arg("relocations"), py::arg("triggers"),
           py::arg("n_launches"), py::arg("form") = py::none(), py::arg("copies_on_device") = true,
           py::arg("gather") = py::none(), py::arg("steps") = py::none(),
           py::arg("for_next_pass") = py::list(), py::arg("own_addresses") = py::list(),
           py::arg("keep") = py::none())
      .def("patch", &patch_words<AscendResident>, py::arg("words"))
      .def("set_stream", &AscendResident::set_stream, py::arg("stream"), Unlocked())
      .def("copy", &AscendResident::copy, py::arg("to"), py::arg("from_"), py::arg("size_bytes"),
           Unlocked())
      .def("execute", &execute_resident<AscendResident>, Unlocked())
      .def("issue", &AscendResident::issue, py::arg("launch"), Unlocked())
      .def("time_launches", &AscendResident::time_launches, py::arg("timer"), Unlocked())
      .def("finish", &AscendResident::finish, Unlocked())
      .def("close", method_of<AscendResident, &AscendResident::close>, Unlocked())
      .def_property_readonly("arena_address", &arena_address<AscendResident>)
      .def_property_readonly("n_launches", &AscendResident::n_launches)
      .def_property_readonly("form",
                             [](const AscendResident& one) { return form_name(one.form()); })
      .def_property_readonly("model_streams",
                             [](const AscendResident& one) {
                               return std::pair(one.streams().count, one.streams().is_told);
                             })
      .def_property_readonly("refresh_counts", &refresh_counts);
}

}  // namespace

void register_ascend(py::module_& module) {
  module.def("ascend_device_count", &device_count, "How many Ascend devices there are.");
  module.def("ascend_device", &device, py::arg("index"),
             "The name of an Ascend device's chip, its memory in bytes, and what of it is free.");
  module.def("ascend_capabilities", &capabilities,
             "By name, what the Ascend runtime has of what is optional.");
  module.def(
      "ascend_missing_operators", &acl::GatherOperators::missing,
      "What the operator libraries lack of what a gather by operators needs; empty: nothing.");
  module.def(
      "ascend_initialize", [] { Runtime::get().initialize(); },
      "Take a reference on the Ascend runtime once more, after somebody has ended it.");
  module.def(
      "ascend_release", [] { Runtime::get().release(); },
      "Give back the references on the Ascend runtime; nothing of it is used afterwards.");
  module.def("ascend_streams", &acl::CountedStreams::count,
             "How many Ascend streams offload holds in this process.");
  module.attr("ASCEND_GATHER_ARGUMENTS_BYTES") = acl::kGatherArgumentsBytes;
  module.attr("ASCEND_LAUNCH_BYTES") = acl::kLaunchBytes;
  module.def("ascend_stream_budget", &acl::stream_budget, py::arg("soc_name"),
             "How many streams a device with a chip of this name has; None: not documented.");
  py::class_<KernelBinary, std::shared_ptr<KernelBinary>>(module, "AscendBinary")
      .def(py::init([](int index, const py::bytes& image) {
             return std::make_shared<KernelBinary>(index, static_cast<std::string>(image));
           }),
           py::arg("device"), py::arg("image"))
      .def(
          "function",
          [](const KernelBinary& binary, const std::string& name) {
            return reinterpret_cast<std::uint64_t>(binary.function(name));
          },
          py::arg("name"));
  register_resident(module);
  register_offline(module);
}

}  // namespace offload
