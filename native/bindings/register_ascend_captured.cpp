#include <pybind11/stl.h>

#include <string_view>
#include <tuple>

#include "ascend/captured_resident.hpp"
#include "ascend/model_tasks.hpp"
#include "gil.hpp"
#include "method_of.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using acl::CapturedResident;
using acl::CapturedTable;
using acl::CopyForm;
using acl::MovingCopies;
using acl::Runtime;

using Cell = std::pair<std::uint64_t, std::uint64_t>;  // addresses of a seed and an offset

const char* form_name(CopyForm form) {
  return form == CopyForm::kCaptured ? "captured" : "enqueued";
}

std::optional<CopyForm> to_form(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  if (*name == "captured") return CopyForm::kCaptured;
  if (*name == "enqueued") return CopyForm::kEnqueued;
  throw std::invalid_argument("copies are 'captured' or 'enqueued', got '" + *name + "'");
}

// Destroyed with the device's context, which is current now.
template <typename Object>
std::shared_ptr<Object> held_on_device(const Runtime& runtime, const acl::Device& device,
                                       std::unique_ptr<Object> object) {
  return {object.release(), [&runtime, device](Object* held) {
            const acl::ContextScope current(runtime, device);
            delete held;
          }};
}

// (bytes, copied in, copied out) of each tensor.
std::shared_ptr<MovingCopies> make_copies(
    int device_index, const std::vector<std::tuple<std::size_t, bool, bool>>& tensors,
    const std::optional<std::string>& form) {
  const GilReleased release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  std::vector<acl::MovingTensor> moving;
  for (const auto& [n_bytes, copied_in, copied_out] : tensors) {
    moving.push_back({n_bytes, copied_in, copied_out});
  }
  const acl::ContextScope scope(runtime, device);
  return held_on_device(runtime, device, acl::make_moving_copies(runtime, moving, to_form(form)));
}

// A copy on, to or from the device; waits for it.
void copy_memory(int index, void* to, const void* from, std::size_t n_bytes, acl::MemcpyKind kind) {
  if (n_bytes == 0) return;
  const GilReleased release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, index);
  const acl::ContextScope scope(runtime, device);
  const acl::RelaxedCapture relaxed(runtime);
  runtime.check(runtime.memcpy(to, n_bytes, from, n_bytes, kind), "copying a device's memory");
}

// With its device's context current.
template <typename Ask>
auto ask_model(int device_index, std::uint64_t model, const Ask& ask) {
  const GilReleased release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  const acl::ContextScope scope(runtime, device);
  return ask(runtime, to_handle<acl::Model>(model));
}

// (stream, type, function, blocks on the device, address, arguments) of each.
py::list captured_tasks(int device, std::uint64_t model) {
  py::list found;
  for (const acl::CapturedTask& task : ask_model(device, model, acl::read_tasks)) {
    const auto& bytes = task.arguments;
    found.append(
        py::make_tuple(task.stream, static_cast<int>(task.type),
                       reinterpret_cast<std::uint64_t>(task.function), task.n_blocks, task.address,
                       py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
  }
  return found;
}

py::bytes read_memory(int index, std::uint64_t address, std::size_t n_bytes) {
  std::string content(n_bytes, '\0');
  copy_memory(index, content.data(), to_handle<const void*>(address), n_bytes, acl::kDeviceToHost);
  return content;
}

// (address, content) of each block; (block, offset in bytes) of each word; its (slot, offset).
using BlockTuples = std::vector<std::pair<std::uint64_t, py::bytes>>;
using WordTuples = std::vector<std::pair<std::uint32_t, std::size_t>>;
using PlaceTuples = std::vector<std::pair<std::uint32_t, std::uint64_t>>;

acl::CapturedWords to_words(const BlockTuples& blocks, const WordTuples& words,
                            const PlaceTuples& places, std::uint32_t feature_map_slot,
                            std::uint64_t home) {
  acl::CapturedWords found;
  found.feature_map_slot = feature_map_slot;
  found.home = home;
  for (const auto& [address, content] : blocks) {
    const auto bytes = static_cast<std::string_view>(content);
    found.blocks.push_back({address, {bytes.begin(), bytes.end()}});
  }
  for (const auto& [block, offset_bytes] : words) found.words.push_back({block, offset_bytes});
  for (const auto& [slot, offset_bytes] : places) {
    const auto word = static_cast<std::uint32_t>(found.relocations.size());
    found.relocations.push_back({word, slot, offset_bytes});
  }
  return found;
}

// (number of the task, address, content) of each kernel's block; (block, offset in bytes, whether
// it is an input's or output's) of each patched word; (block, offset in bytes, byte of the block
// that it points to) of each word that points into its own block.
using KernelTuples = std::vector<std::tuple<std::size_t, std::uint64_t, py::bytes>>;
using TableWords = std::vector<std::tuple<std::uint32_t, std::size_t, bool>>;
using OwnTuples = std::vector<std::tuple<std::uint32_t, std::size_t, std::uint64_t>>;

std::shared_ptr<CapturedTable> make_table(int device_index, std::uint64_t model,
                                          const KernelTuples& kernels, const TableWords& words,
                                          const OwnTuples& own) {
  acl::TableParts parts;
  std::vector<acl::MovedKernel> moved;
  for (const auto& [task, address, content] : kernels) {
    const auto bytes = static_cast<std::string_view>(content);
    parts.blocks.emplace_back(bytes.begin(), bytes.end());
    moved.push_back({task, address});
  }
  for (const auto& [block, offset_bytes, is_io] : words) {
    const auto word = static_cast<std::uint32_t>(parts.words.size());
    parts.words.push_back({block, offset_bytes});
    parts.relocations.push_back({word, is_io ? 0U : 1U, 0});
  }
  parts.triggers = {Trigger::kIo, Trigger::kFeatureMap};
  for (const auto& [block, offset_bytes, target_bytes] : own) {
    parts.own.push_back({{block, offset_bytes}, target_bytes});
  }
  const GilReleased release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  const acl::ContextScope scope(runtime, device);
  return held_on_device(
      runtime, device,
      std::make_unique<CapturedTable>(runtime, to_handle<acl::Model>(model), parts, moved));
}

void install_table(CapturedTable& table, int device_index) {
  const GilReleased release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  const acl::ContextScope scope(runtime, device);
  table.install();
}

std::shared_ptr<CapturedResident> make_captured(
    int device, std::uint64_t model, std::shared_ptr<MovingCopies> copies,
    std::vector<std::uint32_t> slots, std::size_t n_launches, const std::vector<Cell>& random_cells,
    py::object release, const BlockTuples& blocks, const WordTuples& words,
    const PlaceTuples& places, std::uint32_t feature_map_slot, std::uint64_t home,
    std::shared_ptr<CapturedTable> table, std::shared_ptr<acl::StreamedSteps> steps,
    std::vector<std::size_t> for_next_pass) {
  acl::CapturedProgram program;
  program.device = device;
  program.model = to_handle<acl::Model>(model);
  program.copies = std::move(copies);
  program.slots = std::move(slots);
  program.arguments = to_words(blocks, words, places, feature_map_slot, home);
  program.table = std::move(table);
  program.n_launches = n_launches;
  program.steps = std::move(steps);
  program.for_next_pass = std::move(for_next_pass);
  for (const auto& [seed, offset] : random_cells) program.random_cells.push_back({seed, offset});
  program.release = release_by(std::move(release));
  return {new CapturedResident(std::move(program)), DeleteResident<CapturedResident>(py::none())};
}

py::dict refresh_counts(const CapturedResident& resident) {
  const acl::RefreshCounts& counts = resident.refresh_counts();
  py::dict found;
  found["copies"] = counts.copies;
  found["bytes_copied"] = counts.bytes_copied;
  return found;
}

py::dict copy_counts(const CapturedResident& resident) {
  const acl::CopyCounts counts = resident.counts();
  py::dict found;
  found["refreshes"] = counts.refresh.copies;
  found["bytes_refreshed"] = counts.refresh.bytes_copied;
  found["enqueued"] = counts.enqueued;
  return found;
}

}  // namespace

void register_ascend_captured(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  module.def(
      "ascend_capturing_model",
      [](std::uint64_t stream) {
        const acl::Model model =
            acl::capturing_model(Runtime::get(), to_handle<acl::Stream>(stream));
        return reinterpret_cast<std::uint64_t>(model);
      },
      py::arg("stream"), "The model of the capture under way on an Ascend stream.");
  module.def(
      "ascend_abandon_capture",
      [](std::uint64_t stream) {
        acl::abandon_capture(Runtime::get(), to_handle<acl::Stream>(stream));
      },
      py::arg("stream"),
      "End what is being captured on an Ascend stream, and destroy its model, if anything is.");
  module.def(
      "ascend_count_tasks",
      [](int device, std::uint64_t model) { return ask_model(device, model, acl::count_tasks); },
      py::arg("device"), py::arg("model"),
      "How many tasks there are on each stream of a model, captured or being captured.");
  module.def("ascend_captured_tasks", &captured_tasks, py::arg("device"), py::arg("model"),
             "For each task of a captured model its stream, type, function, blocks on the device, "
             "and where which arguments lie.");
  module.def("ascend_read_memory", &read_memory, py::arg("device"), py::arg("address"),
             py::arg("size_bytes"), "Copy bytes of an Ascend device to the host, and wait.");
  module.def(
      "ascend_write_memory",
      [](int device, std::uint64_t address, const std::string& content) {
        copy_memory(device, to_handle<void*>(address), content.data(), content.size(),
                    acl::kHostToDevice);
      },
      py::arg("device"), py::arg("address"), py::arg("content"),
      "Copy bytes of the host to an Ascend device, and wait.");
  module.def(
      "ascend_copy_memory",
      [](int device, std::uint64_t to, std::uint64_t from, std::size_t n_bytes) {
        copy_memory(device, to_handle<void*>(to), to_handle<const void*>(from), n_bytes,
                    acl::kDeviceToDevice);
      },
      py::arg("device"), py::arg("to"), py::arg("from_"), py::arg("size_bytes"),
      "Copy bytes from one place of an Ascend device to another, and wait.");
  py::class_<MovingCopies, std::shared_ptr<MovingCopies>>(module, "AscendMovingCopies")
      .def(py::init(&make_copies), py::kw_only(), py::arg("device"), py::arg("tensors"),
           py::arg("form") = py::none())
      .def_property_readonly("form", [](const MovingCopies& one) { return form_name(one.form()); })
      .def(
          "set_place",
          [](MovingCopies& copies, std::size_t tensor, std::uint64_t place) {
            if (tensor >= copies.size()) throw py::index_error("there is no such tensor");
            copies.set_place(tensor, place);
          },
          py::arg("tensor"), py::arg("place"))
      .def(
          "capture_in",
          [](MovingCopies& copies, std::uint64_t stream) {
            copies.capture_in(to_handle<acl::Stream>(stream));
          },
          py::arg("stream"))
      .def(
          "capture_out",
          [](MovingCopies& copies, std::uint64_t stream) {
            copies.capture_out(to_handle<acl::Stream>(stream));
          },
          py::arg("stream"));
  py::class_<CapturedTable, std::shared_ptr<CapturedTable>>(module, "AscendCapturedTable")
      .def(py::init(&make_table), py::kw_only(), py::arg("device"), py::arg("model"),
           py::arg("kernels"), py::arg("words"), py::arg("own") = OwnTuples())
      .def("install", &install_table, py::arg("device"))
      .def_property_readonly("size_bytes",
                             [](CapturedTable& table) { return table.table().size_bytes(); })
      .def_property_readonly(
          "addresses",
          [](CapturedTable& table) {
            std::vector<std::uint64_t> found;
            for (std::size_t block = 0; block < table.n_kernels(); ++block) {
              found.push_back(reinterpret_cast<std::uint64_t>(table.table().block(block)));
            }
            return found;
          })
      .def_property_readonly("n_set", &CapturedTable::n_set)
      .def_property_readonly("n_updates", &CapturedTable::n_updates);
  py::class_<CapturedResident, Resident, std::shared_ptr<CapturedResident>>(
      module, "AscendCapturedResident", py::multiple_inheritance())
      .def(py::init(&make_captured), py::kw_only(), py::arg("device"), py::arg("model"),
           py::arg("copies"), py::arg("slots"), py::arg("n_launches"),
           py::arg("random_cells") = py::list(), py::arg("release"),
           py::arg("blocks") = BlockTuples(), py::arg("words") = WordTuples(),
           py::arg("places") = PlaceTuples(), py::arg("feature_map_slot") = 0, py::arg("home") = 0,
           py::arg("table") = py::none(), py::arg("steps") = py::none(),
           py::arg("for_next_pass") = py::list())
      .def("patch", &patch_words<CapturedResident>, py::arg("words"))
      .def("set_stream", &CapturedResident::set_stream, py::arg("stream"), Unlocked())
      .def("set_random", &CapturedResident::set_random, py::arg("seeds_and_offsets"), Unlocked())
      .def("execute", &execute_resident<CapturedResident>, Unlocked())
      .def("finish", &CapturedResident::finish, Unlocked())
      .def("close", method_of<CapturedResident, &CapturedResident::close>, Unlocked())
      .def_property_readonly("model_streams",
                             [](const CapturedResident& one) {
                               return std::pair(one.streams().count, one.streams().is_told);
                             })
      .def_property_readonly("refresh_counts", &refresh_counts)
      .def_property_readonly("copy_counts", &copy_counts);
}

}  // namespace offload
