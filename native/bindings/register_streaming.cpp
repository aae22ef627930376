#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "gil.hpp"
#include "offload/steps.hpp"
#include "offload/streaming.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using TransferFields = std::tuple<double, std::int64_t, std::int64_t>;
using StepFields = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
using WeightFields = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>;
using PassFields = std::tuple<double, std::vector<double>, std::vector<double>, std::vector<double>,
                              std::vector<double>>;
using LayoutFields =
    std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>,
               std::vector<std::int64_t>, std::int64_t, double>;

PassFields simulate(std::vector<double> launch_ns, const std::vector<TransferFields>& fields) {
  const GilReleased release;
  std::vector<StreamingTransfer> transfers;
  transfers.reserve(fields.size());
  for (const auto& [duration_ns, first_launch, after_step] : fields) {
    transfers.push_back({duration_ns, first_launch, after_step});
  }
  StreamingPass pass = StreamingSimulator(std::move(launch_ns)).pass(transfers);
  return {pass.period_ns, std::move(pass.launch_begin_ns), std::move(pass.launch_end_ns),
          std::move(pass.transfer_begin_ns), std::move(pass.transfer_end_ns)};
}

PassFields simulate_lanes(const std::vector<std::vector<StepFields>>& lanes,
                          const std::vector<double>& launch_ns,
                          const std::vector<double>& copy_ns) {
  const GilReleased release;
  std::vector<LaneSteps> steps(lanes.size());
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    for (const auto& [kind, first, second] : lanes[lane]) {
      steps[lane].push_back({static_cast<StepKind>(kind), first, second});
    }
  }
  SimulatedSteps found = simulate_steps(steps, launch_ns, copy_ns);
  return {found.period_ns, std::move(found.launch_begin_ns), std::move(found.launch_end_ns),
          std::move(found.copy_begin_ns), std::move(found.copy_end_ns)};
}

std::tuple<std::optional<LayoutFields>, std::int64_t> search(
    const std::vector<double>& launch_ns, const std::vector<WeightFields>& fields,
    double bytes_per_second, double overhead_ns, std::int64_t budget_bytes,
    std::int64_t floor_bytes, double floor_period_ns, std::int64_t alignment_bytes,
    std::int64_t granule_bytes, bool tails) {
  const GilReleased release;
  std::vector<StreamingWeight> weights;
  weights.reserve(fields.size());
  for (const auto& [size_bytes, first_launch, last_launch, stays] : fields) {
    weights.push_back({size_bytes, first_launch, last_launch, stays});
  }
  StreamingSearch found =
      search_streaming(launch_ns, weights,
                       {bytes_per_second, overhead_ns, budget_bytes, floor_bytes, floor_period_ns,
                        alignment_bytes, granule_bytes, tails});
  if (!found.best) return {std::nullopt, found.n_candidates};
  StreamingLayout& best = *found.best;
  std::vector<std::int64_t> after_steps;
  after_steps.reserve(best.transfers.size());
  for (const StreamingTransfer& one : best.transfers) after_steps.push_back(one.after_step);
  return {
      LayoutFields{std::move(best.streamed_bytes), std::move(best.ring_offset_bytes),
                   std::move(best.order), std::move(after_steps), best.ring_bytes, best.period_ns},
      found.n_candidates};
}

}  // namespace

void register_streaming(py::module_& module) {
  module.def("simulate_streaming", &simulate, py::arg("launch_ns"), py::arg("transfers"));
  module.def("simulate_steps", &simulate_lanes, py::arg("lanes"), py::arg("launch_ns"),
             py::arg("copy_ns"));
  module.attr("STEP_KINDS") = std::vector<std::int64_t>{
      static_cast<std::int64_t>(StepKind::kRun), static_cast<std::int64_t>(StepKind::kCopy),
      static_cast<std::int64_t>(StepKind::kRecord), static_cast<std::int64_t>(StepKind::kWait)};
  module.def("search_streaming", &search, py::arg("launch_ns"), py::arg("weights"), py::kw_only(),
             py::arg("bytes_per_second"), py::arg("overhead_ns"), py::arg("budget_bytes"),
             py::arg("floor_bytes"), py::arg("floor_period_ns"), py::arg("alignment_bytes"),
             py::arg("granule_bytes"), py::arg("tails"));
}

}  // namespace offload
