#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "cpu/lanes.hpp"
#include "gil.hpp"
#include "registers.hpp"
#include "run/operator_threads.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using Step = std::tuple<LaneStep::Kind, std::size_t, std::size_t>;
using Ending = std::tuple<std::size_t, std::int64_t, std::size_t, std::vector<std::size_t>>;

void set_lanes(CpuResident& resident, const std::vector<std::vector<Step>>& lanes,
               std::vector<Ending> endings) {
  std::vector<std::vector<LaneStep>> steps;
  for (const auto& lane : lanes) {
    auto& row = steps.emplace_back();
    for (const auto& [kind, first, last] : lane) row.push_back({kind, first, last});
  }
  std::vector<CpuEnding> found;
  for (auto& [slot, offset_bytes, size_bytes, launches] : endings) {
    found.push_back({slot, offset_bytes, size_bytes, std::move(launches)});
  }
  const GilReleased release;  // a thread that forks holds the helpers, and waits for the GIL
  resident.set_lanes(std::make_unique<CpuLanes>(resident, std::move(steps), std::move(found)));
}

CpuLanes& lanes_of(const CpuResident& resident) {
  if (resident.lanes() == nullptr) throw std::invalid_argument("the resident has no lanes");
  return *resident.lanes();
}

}  // namespace

void register_lanes(py::module_& module) {
  py::enum_<LaneStep::Kind>(module, "LaneStep")
      .value("RUN", LaneStep::Kind::kRun)
      .value("RECORD", LaneStep::Kind::kRecord)
      .value("WAIT", LaneStep::Kind::kWait);
  py::class_<CpuLaneCounts>(module, "LaneCounts")
      .def_readonly("n_shared", &CpuLaneCounts::n_shared)
      .def_readonly("n_alone", &CpuLaneCounts::n_alone)
      .def_readonly("n_helped", &CpuLaneCounts::n_helped);
  module.def("set_lanes", &set_lanes, py::arg("resident"), py::arg("lanes"), py::arg("endings"),
             "Has executions run on lanes of (step, first, last), each of one thread; slots are "
             "given back, or bytes of them overwritten, once all launches of an ending have.");
  module.def(
      "lane_counts", [](const CpuResident& resident) { return lanes_of(resident).counts(); },
      py::arg("resident"));
  module.def(
      "share_always",
      [](const CpuResident& resident, bool always) {
        lanes_of(resident).share(always ? CpuSharing::kAlways : CpuSharing::kBalanced);
      },
      py::arg("resident"), py::arg("always"),
      "Lets helpers take part in each execution, whether or not that pays.");
  module.def("set_share", &CpuResident::set_share, py::arg("resident"), py::arg("n_threads"),
             py::arg("duty"), "How much of the processor executions take: see CpuResident.");
  module.def(
      "n_helpers", [] { return Helpers::instance().n_started(); }, py::call_guard<GilReleased>(),
      "How many helpers this process has started.");
  module.def("sets_operator_threads", &OperatorThreads::is_supported,
             "Whether operators on a thread can be told among how many to share their work.");
}

}  // namespace offload
