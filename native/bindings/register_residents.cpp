#include <pybind11/stl.h>

#include <array>

#include "convert.hpp"
#include "cpu/allocations.hpp"
#include "cpu/cpu_resident.hpp"
#include "gil.hpp"
#include "interrupted.hpp"
#include "launch_arguments.hpp"
#include "null/null_resident.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

void add_launch(CpuResident& resident, const std::string& operator_name,
                const std::string& overload, const py::tuple& arguments,
                const std::optional<std::string>& out_overload,
                const std::vector<std::size_t>& outputs, std::vector<CpuMade> made,
                std::vector<std::size_t> releases, py::handle guard, bool guards_shape,
                const std::string& source, const std::optional<std::array<std::size_t, 4>>& table) {
  const auto tensor = [&](std::size_t index) { return resident.tensor(index); };
  CpuLaunch launch = to_launch(tensor, operator_name, overload, arguments, std::move(made),
                               std::move(releases), guard, guards_shape, source);
  launch.has_out = out_overload.has_value();
  launch.out_overload = out_overload.value_or("");
  for (const std::size_t output : outputs) launch.outputs.push_back(resident.tensor(output));
  if (table) launch.table = RowTable{(*table)[0], (*table)[1], (*table)[2], (*table)[3]};
  resident.add(std::move(launch));
}

// Whether torch raises errors of this class for an operator. Others come from an interrupt, or a
// signal handler.
bool is_of_operators(const py::error_already_set& error) {
  return error.matches(PyExc_RuntimeError) || error.matches(PyExc_ValueError) ||
         error.matches(PyExc_TypeError) || error.matches(PyExc_LookupError) ||
         error.matches(PyExc_ArithmeticError) || error.matches(PyExc_MemoryError);
}

// A Python function, called and released under the GIL. What an operator raises in it becomes an
// exception that can be handled and dropped without the GIL.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> calling(py::object function) {
  const std::shared_ptr<PyObject> held(function.release().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    const GilHeld gil;
    Py_DECREF(object);
  });
  return [held](const Arguments&... arguments) {
    const GilHeld gil;
    try {
      return py::reinterpret_borrow<py::object>(held.get())(arguments...).template cast<Result>();
    } catch (const py::error_already_set& error) {
      if (!is_of_operators(error)) throw Interrupted(error);
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
  };
}

void add_kernel(CpuResident& resident, std::uintptr_t function,
                const std::vector<std::pair<std::size_t, std::int64_t>>& words, py::object prove,
                py::object make_replaced, const std::string& name, const std::string& source,
                std::vector<std::size_t> releases, const py::sequence& sources) {
  CpuKernel kernel;
  for (const py::handle one : sources) {
    if (py::isinstance<py::int_>(one)) {
      kernel.sources.push_back({{}, one.cast<std::size_t>()});
    } else {
      kernel.sources.push_back({to_tensors(one), std::nullopt});
    }
  }
  kernel.function = reinterpret_cast<CpuKernel::Function>(function);
  for (const auto& [slot, offset_bytes] : words) kernel.words.push_back({slot, offset_bytes});
  kernel.prove = calling<bool, CpuKernel::Addresses>(std::move(prove));
  kernel.make_replaced = calling<CpuReplaced>(std::move(make_replaced));
  resident.add_kernel(std::move(kernel), name, source, std::move(releases));
}

// Calls compiled code once, for its proof.
void call_kernel(std::uintptr_t function, const std::vector<std::uintptr_t>& words) {
  const GilReleased release;
  reinterpret_cast<CpuKernel::Function>(function)(reinterpret_cast<void* const*>(words.data()));
}

const char* mode_name(CpuMode mode) {
  switch (mode) {
    case CpuMode::kCall:
      return "call";
    case CpuMode::kThunk:
      return "thunk";
    case CpuMode::kOut:
      return "out";
    case CpuMode::kCopied:
      return "copied";
    case CpuMode::kUnproved:
      return "unproved";
    case CpuMode::kGathered:
      return "gathered";
    case CpuMode::kKernel:
      return "kernel";
    case CpuMode::kReplaced:
      return "replaced";
    case CpuMode::kStart:
      return "start";
    case CpuMode::kWait:
      return "wait";
  }
  return "";
}

py::list launch_modes(const CpuResident& resident) {
  py::list modes;
  for (const CpuLaunch& launch : resident.launches()) {
    modes.append(py::make_tuple(mode_name(launch.mode), launch.outside_bytes));
  }
  return modes;
}

}  // namespace

void register_residents(py::module_& module) {
  py::class_<Resident, std::shared_ptr<Resident>>(module, "Resident");  // NOLINT
  py::class_<TensorIndex>(module, "TensorIndex")
      .def(py::init<std::size_t>(), py::arg("index"))
      .def_readonly("index", &TensorIndex::index);
  py::enum_<CpuMemory>(module, "CpuMemory")
      .value("PATCHED", CpuMemory::kPatched)
      .value("OPERATOR", CpuMemory::kOperator)
      .value("KEPT", CpuMemory::kKept)
      .value("OF_SIZES", CpuMemory::kOfSizes);
  py::class_<CpuSlot>(module, "CpuSlot")
      .def(py::init<std::size_t, CpuMemory>(), py::arg("size_bytes"), py::arg("memory"));
  py::class_<CpuTensor>(module, "CpuTensor")
      .def(py::init<std::size_t, std::int64_t, TensorLayout>(), py::arg("slot"),
           py::arg("offset_bytes"), py::arg("layout"));
  py::class_<CpuMade>(module, "CpuMade")
      .def(py::init<std::size_t, std::size_t, std::int64_t, TensorLayout>(), py::arg("position"),
           py::arg("slot"), py::arg("offset_bytes"), py::arg("layout"));
  module.def(
      "has_thunk", [](const std::string& name) { return find_thunk(name) != nullptr; },
      py::arg("operator_name"), "Whether a typed out-variant of this operator is built in.");

  module.def("call_kernel", &call_kernel, py::arg("function"), py::arg("words"),
             "Calls compiled code with the addresses of its Values; raises what it throws.");

  py::class_<CpuResident, Resident, std::shared_ptr<CpuResident>>(module, "CpuResident",
                                                                  py::multiple_inheritance())
      .def(py::init([](std::vector<CpuSlot> slots, const std::vector<CpuTensor>& tensors,
                       std::shared_ptr<WeightStream> stream) {
             const GilReleased release;
             return std::shared_ptr<CpuResident>(
                 new CpuResident(std::move(slots), tensors, std::move(stream)),
                 delete_without_gil<CpuResident>);
           }),
           py::arg("slots"), py::arg("tensors"), py::arg("stream") = nullptr)
      .def("add", &add_launch, py::kw_only(), py::arg("operator_name"), py::arg("overload"),
           py::arg("arguments"), py::arg("out_overload"), py::arg("outputs"), py::arg("made"),
           py::arg("releases"), py::arg("guard"), py::arg("guards_shape"), py::arg("source"),
           py::arg("table") = py::none())
      .def("add_kernel", &add_kernel, py::kw_only(), py::arg("function"), py::arg("words"),
           py::arg("prove"), py::arg("make_replaced"), py::arg("name"), py::arg("source"),
           py::arg("releases"), py::arg("sources") = py::tuple())
      .def(
          "set_packed_weights",
          [](CpuResident& resident,
             std::vector<std::pair<std::size_t, std::vector<std::size_t>>> weights) {
            std::vector<PackedWeight> packed;
            for (auto& [weight, launches] : weights)
              packed.push_back({weight, std::move(launches)});
            resident.set_packed_weights(std::move(packed));
          },
          py::arg("weights"))
      .def("require_gradients", &require_gradients<CpuResident>, py::arg("tensors"))
      .def("derive_again", &CpuResident::derive_again)
      .def_property_readonly("launch_modes", &launch_modes);
  py::class_<CpuReplaced>(module, "CpuReplaced")
      .def(py::init([](std::shared_ptr<CpuResident> resident, std::vector<std::size_t> inputs,
                       const std::vector<std::pair<std::size_t, std::size_t>>& results) {
             CpuReplaced replaced{std::move(resident), std::move(inputs), {}};
             for (const auto& [word, slot] : results) replaced.results.push_back({word, slot});
             return replaced;
           }),
           py::arg("resident"), py::arg("inputs"), py::arg("results"));
  py::class_<NullResident, Resident, std::shared_ptr<NullResident>>(module, "NullResident")
      .def(py::init([](const std::vector<std::array<std::uint64_t, 3>>& relocations,
                       std::uint64_t word_ns, std::uint64_t submit_ns,
                       std::vector<std::uint64_t> launch_ns) {
             std::vector<Relocation> converted;
             for (const auto& [word, slot, offset_bytes] : relocations) {
               converted.push_back({static_cast<std::uint32_t>(word),
                                    static_cast<std::uint32_t>(slot), offset_bytes});
             }
             return std::make_shared<NullResident>(std::move(converted), word_ns, submit_ns,
                                                   std::move(launch_ns));
           }),
           py::arg("relocations"), py::arg("word_ns"), py::arg("submit_ns"), py::arg("launch_ns"))
      .def_property_readonly("words", &NullResident::words)
      .def_property_readonly("clock_ns", &NullResident::clock_ns);

  py::class_<AllocationObserver>(module, "AllocationObserver",
                                 "Sees what torch's CPU allocator hands out inside a with-block.")
      .def(py::init<>())
      .def("__enter__",
           [](py::object self) {
             self.cast<AllocationObserver&>().start();
             return self;
           })
      .def("__exit__", [](AllocationObserver& self, const py::args&) { self.stop(); })
      .def("contains", &AllocationObserver::contains, py::arg("address"))
      .def_property_readonly("n_bytes", &AllocationObserver::bytes);
}

}  // namespace offload
