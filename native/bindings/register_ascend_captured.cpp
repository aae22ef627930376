#include <pybind11/stl.h>

#include <tuple>

#include "ascend/captured_resident.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using acl::CapturedResident;
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

// (bytes, copied in, copied out) of each tensor. Destroyed in the device's context as well.
std::shared_ptr<MovingCopies> make_copies(
    int device_index, const std::vector<std::tuple<std::size_t, bool, bool>>& tensors,
    const std::optional<std::string>& form) {
  const py::gil_scoped_release release;
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  std::vector<acl::MovingTensor> moving;
  for (const auto& [n_bytes, copied_in, copied_out] : tensors) {
    moving.push_back({n_bytes, copied_in, copied_out});
  }
  const acl::ContextScope scope(runtime, device);
  return {acl::make_moving_copies(runtime, moving, to_form(form)).release(),
          [&runtime, device](MovingCopies* copies) {
            const acl::ContextScope current(runtime, device);
            delete copies;
          }};
}

// Calls Python, whichever thread it is on; nothing once the interpreter has gone.
std::function<void()> release_by(py::object function) {
  const std::shared_ptr<PyObject> held(function.release().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [held] {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::object>(held.get())();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("releasing a captured model");
    }
  };
}

std::shared_ptr<CapturedResident> make_captured(int device, std::uint64_t model,
                                                std::shared_ptr<MovingCopies> copies,
                                                std::vector<std::uint32_t> slots,
                                                std::size_t n_launches,
                                                const std::vector<Cell>& random_cells,
                                                py::object release) {
  acl::CapturedProgram program;
  program.device = device;
  program.model = to_handle<acl::Model>(model);
  program.copies = std::move(copies);
  program.slots = std::move(slots);
  program.n_launches = n_launches;
  for (const auto& [seed, offset] : random_cells) program.random_cells.push_back({seed, offset});
  program.release = release_by(std::move(release));
  return {new CapturedResident(std::move(program)), DeleteResident<CapturedResident>(py::none())};
}

std::uint64_t read_word(int device_index, std::uint64_t address) {
  const Runtime& runtime = Runtime::get();
  const acl::Device device(runtime, device_index);
  const acl::ContextScope scope(runtime, device);
  const acl::RelaxedCapture relaxed(runtime);
  std::uint64_t word = 0;
  runtime.check(runtime.memcpy(&word, sizeof word, reinterpret_cast<const void*>(address),
                               sizeof word, acl::kDeviceToHost),
                "reading a word of the device's memory");
  return word;
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
  using Unlocked = py::call_guard<py::gil_scoped_release>;
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
  module.def("ascend_read_word", &read_word, py::arg("device"), py::arg("address"), Unlocked(),
             "Eight bytes of an Ascend device's memory, once all that wrote them has ended.");
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
  py::class_<CapturedResident, Resident, std::shared_ptr<CapturedResident>>(
      module, "AscendCapturedResident")
      .def(py::init(&make_captured), py::kw_only(), py::arg("device"), py::arg("model"),
           py::arg("copies"), py::arg("slots"), py::arg("n_launches"),
           py::arg("random_cells") = py::list(), py::arg("release"))
      .def("patch", &patch_words<CapturedResident>, py::arg("words"))
      .def("set_stream", &CapturedResident::set_stream, py::arg("stream"), Unlocked())
      .def("set_random", &CapturedResident::set_random, py::arg("seeds_and_offsets"), Unlocked())
      .def("execute", &execute_resident<CapturedResident>, Unlocked())
      .def("finish", &CapturedResident::finish, Unlocked())
      .def("close", &CapturedResident::close, Unlocked())
      .def_property_readonly("copy_counts", &copy_counts);
}

}  // namespace offload
