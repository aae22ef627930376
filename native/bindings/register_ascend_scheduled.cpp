#include <pybind11/stl.h>

#include <string_view>
#include <tuple>

#include "ascend/scheduled_resident.hpp"
#include "gil.hpp"
#include "raised_in_python.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using acl::ScheduledProgram;
using acl::ScheduledResident;
using acl::SizedKernel;
using acl::ValuePlace;

using Sizes = std::vector<std::int64_t>;
// (name, functions by kernel, the most bytes of their argument blocks)
using LaunchTuple = std::tuple<std::string, std::vector<std::uint64_t>, std::vector<std::size_t>>;
// (kind, slot or number of the constant, offset in bytes)
using PlaceTuple = std::tuple<std::string, std::size_t, std::int64_t>;
// (Value, bytes of an item, sizes, strides and offset, (position, expression) of those that vary)
using ViewTuple = std::tuple<std::size_t, std::int64_t, Sizes,
                             std::vector<std::pair<std::uint32_t, std::uint32_t>>>;
// (blocks on the device, argument block, (offset, Value, offset in it), (offset, offset in the
// block) of words that hold an address in the block itself)
using KernelTuple = std::tuple<std::uint32_t, py::bytes,
                               std::vector<std::tuple<std::size_t, std::size_t, std::int64_t>>,
                               std::vector<std::pair<std::uint32_t, std::uint32_t>>>;

// An object of Python's, dropped under the GIL.
std::shared_ptr<PyObject> held(py::object object) {
  return {object.release().ptr(), [](PyObject* one) {
            if (Py_IsInitialized() == 0) return;
            const GilHeld gil;
            Py_DECREF(one);
          }};
}

SizedKernel to_kernel(const KernelTuple& given) {
  const auto& [n_blocks, block, addresses, own_addresses] = given;
  SizedKernel kernel;
  kernel.n_blocks = n_blocks;
  const auto bytes = static_cast<std::string_view>(block);
  kernel.block.assign(bytes.begin(), bytes.end());
  for (const auto& [offset_bytes, value, value_offset_bytes] : addresses) {
    kernel.addresses.push_back({offset_bytes, value, value_offset_bytes});
  }
  for (const auto& [offset_bytes, target_bytes] : own_addresses) {
    kernel.own_addresses.push_back({offset_bytes, target_bytes});
  }
  return kernel;
}

ScheduledProgram::Tile to_tile(py::object function) {
  return [function = held(std::move(function))](std::size_t launch, const Sizes& sizes) {
    const GilHeld gil;
    try {
      std::vector<SizedKernel> kernels;
      for (const py::handle one : py::handle(function.get())(launch, sizes)) {
        kernels.push_back(to_kernel(one.cast<KernelTuple>()));
      }
      return kernels;
    } catch (py::error_already_set& error) {  // which can be raised once, on a thread with the GIL
      throw RaisedInPython(error.value());
    }
  };
}

ValuePlace::Kind to_kind(const std::string& name) {
  if (name == "slot") return ValuePlace::Kind::kSlot;
  if (name == "feature map") return ValuePlace::Kind::kFeatureMap;
  if (name == "constant") return ValuePlace::Kind::kConstant;
  if (name == "nowhere") return ValuePlace::Kind::kNowhere;
  throw std::invalid_argument("a value lies in a slot, the feature map, a constant or nowhere");
}

// Calls (stage, launch, whether it begins) under the GIL.
class PythonWatcher final : public StageWatcher {
 public:
  explicit PythonWatcher(py::object function) : function_(held(std::move(function))) {}

  void begins(HostStage stage, std::size_t launch) noexcept override { tell(stage, launch, true); }
  void ends(HostStage stage, std::size_t launch) noexcept override { tell(stage, launch, false); }

 private:
  void tell(HostStage stage, std::size_t launch, bool begins) noexcept {
    static constexpr const char* kNames[] = {"tile", "memory", "launch"};
    const GilHeld gil;
    try {
      py::handle(function_.get())(kNames[static_cast<std::size_t>(stage)], launch, begins);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("watching stages of the host");
    } catch (const std::exception&) {  // arguments that cannot be made: memory ran out
    }
  }

  std::shared_ptr<PyObject> function_;
};

std::shared_ptr<ScheduledResident> make(int device_index, const std::vector<LaunchTuple>& launches,
                                        const std::vector<PlaceTuple>& values,
                                        const std::vector<ViewTuple>& views,
                                        std::vector<std::string> dims, py::object tile,
                                        bool tiles_first, int n_cores, bool copies_on_device,
                                        py::object keep) {
  ScheduledProgram program;
  program.device = device_index;
  for (const auto& [name, functions, blocks_bytes] : launches) {
    acl::ScheduledLaunch launch{name, {}, blocks_bytes};
    for (const std::uint64_t function : functions) {
      launch.functions.push_back(to_handle<acl::Function>(function));
    }
    program.launches.push_back(std::move(launch));
  }
  for (const auto& [kind, index, offset_bytes] : values) {
    program.values.push_back({to_kind(kind), index, offset_bytes});
  }
  for (const auto& [value, item_bytes, numbers, varying] : views) {
    acl::CheckedView view{value, item_bytes, numbers, {}};
    for (const auto& [position, expression] : varying) {
      view.varying.push_back({position, expression});
    }
    program.views.push_back(std::move(view));
  }
  program.dims = std::move(dims);
  program.tile = to_tile(std::move(tile));
  program.tiles_first = tiles_first;
  program.n_cores = n_cores;
  program.copies_on_device = copies_on_device;
  ScheduledResident* resident = nullptr;
  {
    const GilReleased release;
    resident = new ScheduledResident(std::move(program));
  }
  return {resident, DeleteResident<ScheduledResident>(std::move(keep))};
}

void watch(ScheduledResident& resident, const py::object& function) {
  resident.watch(function.is_none() ? nullptr : std::make_shared<PythonWatcher>(function));
}

}  // namespace

void register_ascend_scheduled(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  py::class_<ScheduledResident, Resident, std::shared_ptr<ScheduledResident>>(
      module, "AscendScheduledResident", py::multiple_inheritance())
      .def(py::init(&make), py::kw_only(), py::arg("device"), py::arg("launches"),
           py::arg("values"), py::arg("views"), py::arg("dims"), py::arg("tile"),
           py::arg("tiles_first"), py::arg("n_cores"), py::arg("copies_on_device"), py::arg("keep"))
      .def("watch", &watch, py::arg("function"))
      .def_property_readonly("n_staged", &ScheduledResident::n_staged)
      .def("finish", &ScheduledResident::finish, Unlocked());
}

}  // namespace offload
