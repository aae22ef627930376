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

std::shared_ptr<CapturedResident> make_captured(int device, std::uint64_t model,
                                                std::shared_ptr<MovingCopies> copies,
                                                std::vector<std::uint32_t> slots,
                                                std::size_t n_launches, py::object release,
                                                std::shared_ptr<acl::StreamedSteps> steps,
                                                std::vector<std::size_t> for_next_pass) {
  acl::CapturedProgram program;
  program.device = device;
  program.model = to_handle<acl::Model>(model);
  program.copies = std::move(copies);
  program.slots = std::move(slots);
  program.n_launches = n_launches;
  program.steps = std::move(steps);
  program.for_next_pass = std::move(for_next_pass);
  program.release = release_by(std::move(release));
  return {new CapturedResident(std::move(program)), DeleteResident<CapturedResident>(py::none())};
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
           py::arg("copies"), py::arg("slots"), py::arg("n_launches"), py::arg("release"),
           py::arg("steps") = py::none(), py::arg("for_next_pass") = py::list())
      .def("patch", &patch_words<CapturedResident>, py::arg("words"))
      .def("set_stream", &CapturedResident::set_stream, py::arg("stream"), Unlocked())
      .def("execute", &execute_resident<CapturedResident>, Unlocked())
      .def("finish", &CapturedResident::finish, Unlocked())
      .def("close", &CapturedResident::close, Unlocked())
      .def_property_readonly("copy_counts", &copy_counts);
}

}  // namespace offload
