#include "ascend/launch_timer.hpp"
#include "ascend/link_samples.hpp"
#include "ascend/streamed_steps.hpp"
#include "convert.hpp"
#include "gil.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"
#include "weight_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using acl::AscendWeightStream;
using acl::StepKind;
using acl::StepStream;
using acl::StreamedSteps;

std::shared_ptr<AscendWeightStream> make_stream(int device, std::size_t memory_bytes,
                                                std::size_t granule_bytes,
                                                const std::vector<StreamedWeight>& weights,
                                                const std::vector<TransferTuple>& transfers,
                                                std::size_t n_launches, std::uint64_t memory,
                                                py::object release, bool shares_store) {
  auto [plan, sources] =
      stream_arguments(memory_bytes, granule_bytes, weights, transfers, n_launches);
  std::function<void()> gives_back = release_by(std::move(release));
  const GilReleased unlocked;
  return {new AscendWeightStream(device, std::move(plan), std::move(sources), memory,
                                 std::move(gives_back), shares_store),
          delete_without_gil<AscendWeightStream>};
}

// (kind, stream, index)
using StepTuple = std::tuple<StepKind, StepStream, std::size_t>;

std::shared_ptr<StreamedSteps> make_steps(std::shared_ptr<AscendWeightStream> weights,
                                          const std::vector<StepTuple>& tuples) {
  std::vector<acl::Step> steps;
  for (const auto& [kind, stream, index] : tuples) steps.push_back({kind, stream, index});
  return std::make_shared<StreamedSteps>(std::move(weights), std::move(steps));
}

void register_steps(py::module_& module) {
  py::enum_<StepKind>(module, "AscendStepKind")
      .value("NODE", StepKind::kNode)
      .value("COPY", StepKind::kCopy)
      .value("RECORD", StepKind::kRecord)
      .value("WAIT", StepKind::kWait)
      .value("READY", StepKind::kReady);
  py::enum_<StepStream>(module, "AscendStepStream")
      .value("LAUNCHES", StepStream::kLaunches)
      .value("COPIES", StepStream::kCopies);
  py::class_<StreamedSteps, std::shared_ptr<StreamedSteps>>(module, "AscendStreamedSteps")
      .def(py::init(&make_steps), py::arg("weights"), py::arg("steps"))
      .def(
          "before",
          [](StreamedSteps& steps, std::size_t node, std::uint64_t stream) {
            steps.before(node, to_handle<acl::Stream>(stream), steps.weights()->lane());
          },
          py::arg("node"), py::arg("stream"))
      .def(
          "end",
          [](StreamedSteps& steps, std::uint64_t stream) {
            steps.end(to_handle<acl::Stream>(stream), steps.weights()->lane());
          },
          py::arg("stream"));
}

void register_timer(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  const auto around = [](void (acl::LaunchTimer::*mark)(acl::Stream)) {
    return [mark](acl::LaunchTimer& timer, std::uint64_t stream) {
      (timer.*mark)(to_handle<acl::Stream>(stream));
    };
  };
  py::class_<acl::LaunchTime>(module, "AscendLaunchTime")
      .def_readonly("time_ns", &acl::LaunchTime::time_ns)
      .def_readonly("host_was_ahead", &acl::LaunchTime::host_was_ahead);
  py::class_<acl::LaunchTimer, std::shared_ptr<acl::LaunchTimer>>(module, "AscendLaunchTimer")
      .def(py::init([](int device) {
             const GilReleased unlocked;
             return std::shared_ptr<acl::LaunchTimer>(new acl::LaunchTimer(device),
                                                      delete_without_gil<acl::LaunchTimer>);
           }),
           py::arg("device"))
      .def("before", around(&acl::LaunchTimer::before), py::arg("stream"), Unlocked())
      .def("after", around(&acl::LaunchTimer::after), py::arg("stream"), Unlocked())
      .def("take", &acl::LaunchTimer::take, Unlocked());
}

}  // namespace

void register_ascend_weights(py::module_& module) {
  py::class_<AscendWeightStream, DeviceWeightStream, std::shared_ptr<AscendWeightStream>>(
      module, "AscendWeightStream", py::multiple_inheritance())
      .def(py::init(&make_stream), py::kw_only(), py::arg("device"), py::arg("memory_bytes"),
           py::arg("granule_bytes"), py::arg("weights"), py::arg("transfers"),
           py::arg("n_launches"), py::arg("memory"), py::arg("release"),
           py::arg("shares_store") = true)
      .def_property_readonly(
          "outputs_are_early", [](const AscendWeightStream& one) { return one.ready() != nullptr; },
          "Whether outputs are ready before the last copies have ended.");
  register_steps(module);
  register_timer(module);
  define_held_bytes<AscendWeightStream>(module, "ascend_held_bytes");
  module.def("ascend_link_samples", &acl::sample_link, py::arg("device"),
             py::call_guard<GilReleased>(),
             "Times in ns of copies from pinned memory of the host, by their bytes.");
}

}  // namespace offload
