#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "registers.hpp"
#include "run/execution.hpp"

namespace py = pybind11;

namespace offload {
namespace {

const char* policy_name(Policy policy) {
  switch (policy) {
    case Policy::kNone:
      return "none";
    case Policy::kIo:
      return "io";
    case Policy::kAll:
      return "all";
  }
  return "";
}

// (launch, ns) in the order of waiting; no value without tracing.
std::optional<std::vector<std::pair<std::size_t, std::uint64_t>>> waits_by_launch(
    const LastExecution& last) {
  if (!last.stream_waits) return std::nullopt;
  std::vector<std::pair<std::size_t, std::uint64_t>> waits;
  for (const WeightWait& wait : *last.stream_waits) {
    waits.emplace_back(wait.launch, wait.end_ns - wait.begin_ns);
  }
  return waits;
}

}  // namespace

void register_execution(py::module_& module) {
  py::class_<Drain>(module, "Drain")
      .def_readonly("begin_ns", &Drain::begin_ns)
      .def_readonly("end_ns", &Drain::end_ns);
  py::class_<Proof>(module, "Proof")
      .def_readonly("n_launches", &Proof::n_launches)
      .def_readonly("n_failed", &Proof::n_failed)
      .def_readonly("ns", &Proof::ns);
  py::class_<LastExecution>(module, "LastExecution")
      .def_readonly("call_ns", &LastExecution::call_ns)
      .def_readonly("checked_ns", &LastExecution::checked_ns)
      .def_readonly("begin_ns", &LastExecution::begin_ns)
      .def_readonly("bound_ns", &LastExecution::bound_ns)
      .def_readonly("decided_ns", &LastExecution::decided_ns)
      .def_readonly("patched_ns", &LastExecution::patched_ns)
      .def_property_readonly("submitted_ns",
                             [](const LastExecution& last) { return last.submission.end_ns; })
      .def_property_readonly("substage_ends_ns",
                             [](const LastExecution& last) {
                               const auto& ends_ns = last.submission.substage_ends_ns;
                               return std::vector<std::uint64_t>(ends_ns.begin(), ends_ns.end());
                             })
      .def_readonly("end_ns", &LastExecution::end_ns)
      .def_property_readonly("convert_ns", &LastExecution::convert_ns)
      .def_readonly("drain", &LastExecution::drain)
      .def_readonly("drain_of_copies", &LastExecution::drain_of_copies)
      .def_property_readonly("drain_ns", &LastExecution::drain_ns)
      .def_property_readonly("policy_ns", &LastExecution::policy_ns)
      .def_property_readonly("patch_ns", &LastExecution::patch_ns)
      .def_property_readonly("submit_ns", &LastExecution::submit_ns)
      .def_property_readonly("device_ns", &LastExecution::device_ns)
      .def_property_readonly("sizes_were_ready",
                             [](const LastExecution& last) -> std::optional<bool> {
                               if (!last.sizes_found) return std::nullopt;
                               return last.sizes_found->was_ready;
                             })
      .def_property_readonly("prepare_sizes_ns",
                             [](const LastExecution& last) -> std::uint64_t {
                               return last.sizes_found ? last.sizes_found->prepare_ns : 0;
                             })
      .def_readonly("sizes", &LastExecution::sizes)
      .def_readonly("resize_ns", &LastExecution::resize_ns)
      .def_readonly("bytes_copied", &LastExecution::bytes_copied)
      .def_readonly("outputs_allocated", &LastExecution::outputs_allocated)
      .def_readonly("bytes_streamed", &LastExecution::bytes_streamed)
      .def_readonly("stream_timed_bytes", &LastExecution::stream_timed_bytes)
      .def_readonly("stream_busy_ns", &LastExecution::stream_busy_ns)
      .def_readonly("stream_wait_ns", &LastExecution::stream_wait_ns)
      .def_readonly("pass_ns", &LastExecution::pass_ns)
      .def_property_readonly("stream_waits", &waits_by_launch)
      .def_readonly("n_executions", &LastExecution::n_executions)
      .def_property_readonly("launches_proved",
                             [](const LastExecution& last) { return last.proof.n_launches; })
      .def_property_readonly("proof_ns", [](const LastExecution& last) { return last.proof.ns; })
      .def_property_readonly(
          "policy", [](const LastExecution& last) { return policy_name(last.counts.policy); })
      .def_property_readonly("slots_changed",
                             [](const LastExecution& last) { return last.counts.slots_changed; })
      .def_property_readonly("words_patched",
                             [](const LastExecution& last) { return last.counts.words_patched; });
  py::class_<Transfer>(module, "Transfer")
      .def_readonly("begin_ns", &Transfer::begin_ns)
      .def_readonly("end_ns", &Transfer::end_ns)
      .def_readonly("size_bytes", &Transfer::size_bytes)
      .def_readonly("inbound", &Transfer::inbound);
  py::class_<TransferTime>(module, "TransferTime")
      .def_readonly("weight", &TransferTime::weight)
      .def_readonly("begin_ns", &TransferTime::begin_ns)
      .def_readonly("end_ns", &TransferTime::end_ns)
      .def_readonly("size_bytes", &TransferTime::size_bytes);
  py::class_<WeightWait>(module, "WeightWait")
      .def_readonly("launch", &WeightWait::launch)
      .def_readonly("begin_ns", &WeightWait::begin_ns)
      .def_readonly("end_ns", &WeightWait::end_ns);
  py::class_<LaunchTimes>(module, "LaunchTimes")
      .def_readonly("begin_ns", &LaunchTimes::begin_ns)
      .def_readonly("end_ns", &LaunchTimes::end_ns);
  py::class_<ExecutionTrace>(module, "ExecutionTrace")
      .def_readonly("execution", &ExecutionTrace::execution)
      .def_readonly("launches", &ExecutionTrace::launches)
      .def_readonly("issues", &ExecutionTrace::issues)
      .def_readonly("transfers", &ExecutionTrace::transfers)
      .def_readonly("weight_transfers", &ExecutionTrace::weight_transfers)
      .def_readonly("weight_waits", &ExecutionTrace::weight_waits);
  module.def(
      "clock_read_ns",
      [](std::uint64_t n_reads) {
        const std::uint64_t begin_ns = now_ns();
        std::uint64_t end_ns = begin_ns;
        for (std::uint64_t read = 0; read < n_reads; ++read) end_ns = now_ns();
        return static_cast<double>(end_ns - begin_ns) / static_cast<double>(n_reads);
      },
      py::arg("n_reads"), "What one read of the clock costs, in ns, over so many of them.");
}

}  // namespace offload
