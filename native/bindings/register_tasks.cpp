#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "integer_buffer.hpp"
#include "offload/device_choice.hpp"
#include "offload/dispatch_check.hpp"
#include "offload/errors.hpp"
#include "offload/lane_schedule.hpp"
#include "offload/segment_dispatch.hpp"
#include "offload/task_placement.hpp"
#include "registers.hpp"
#include "segment_graph_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using PlacementFields =
    std::tuple<Integers, Integers, Integers, std::int64_t, std::int64_t, double>;
using FoundFields = std::tuple<PlacementFields, std::string, std::int64_t, std::int64_t, double,
                               std::int64_t, std::vector<std::pair<std::string, double>>>;

TaskGraph to_graph(const py::buffer& costs_ns, const py::buffer& memory_bytes,
                   const py::buffer& edges, const std::vector<LinkFields>& links,
                   const py::buffer& limits_bytes, const std::vector<double>& busy_watts,
                   const std::vector<double>& idle_watts) {
  TaskGraph graph;
  graph.costs_ns = to_integers(costs_ns, "costs_ns");
  graph.memory_bytes = to_integers(memory_bytes, "memory_bytes");
  graph.memory_limits_bytes = to_integers(limits_bytes, "limits_bytes");
  graph.n_processors = graph.memory_limits_bytes.size();
  const Integers fields = to_integers(edges, "edges");
  if (fields.size() % 3 != 0) throw PlanError("an edge has a producer, a consumer and a size");
  for (std::size_t at = 0; at < fields.size(); at += 3) {
    graph.edges.push_back({fields[at], fields[at + 1], fields[at + 2]});
  }
  for (const auto& [overhead_ns, bytes_per_second] : links) {
    graph.links.push_back({overhead_ns, bytes_per_second});
  }
  graph.busy_watts = busy_watts;
  graph.idle_watts = idle_watts;
  return graph;
}

FoundFields place(const py::buffer& costs_ns, const py::buffer& memory_bytes,
                  const py::buffer& edges, const std::vector<LinkFields>& links,
                  const py::buffer& limits_bytes, const std::vector<double>& busy_watts,
                  const std::vector<double>& idle_watts, std::int64_t objective,
                  double max_slowdown, std::int64_t max_evaluations, std::uint64_t seed) {
  const TaskGraph graph =
      to_graph(costs_ns, memory_bytes, edges, links, limits_bytes, busy_watts, idle_watts);
  const GilReleased release;
  FoundPlacement found = place_tasks(
      graph, {static_cast<TaskObjective>(objective), max_slowdown, max_evaluations, seed});
  TaskPlacement& one = found.placement;
  return {PlacementFields{std::move(one.processors), std::move(one.begin_ns), std::move(one.end_ns),
                          one.latency_ns, one.period_ns, one.energy_nj},
          std::move(found.method),
          found.n_evaluations,
          found.lower_bound_ns,
          found.lower_bound_nj,
          found.latency_limit_ns,
          std::move(found.candidates)};
}

std::vector<double> costs_elsewhere(const py::buffer& costs_ns, const py::buffer& memory_bytes,
                                    const py::buffer& edges, const std::vector<LinkFields>& links,
                                    const py::buffer& limits_bytes,
                                    const std::vector<double>& busy_watts,
                                    const std::vector<double>& idle_watts, std::int64_t objective,
                                    const py::buffer& processors, const py::buffer& order,
                                    const std::vector<Integers>& groups,
                                    std::int64_t latency_limit_ns) {
  const TaskGraph graph =
      to_graph(costs_ns, memory_bytes, edges, links, limits_bytes, busy_watts, idle_watts);
  const Integers where = to_integers(processors, "processors");
  const Integers in_order = to_integers(order, "order");
  const GilReleased release;
  return moved_costs(graph, static_cast<TaskObjective>(objective), where, in_order, groups,
                     latency_limit_ns);
}

using WaitFields = std::tuple<std::int64_t, std::int64_t>;
using LaneFields = std::tuple<Integers, std::vector<WaitFields>, Integers, Integers, double, double,
                              std::string, std::int64_t>;

LaneFields schedule(std::vector<double> launch_ns, const py::buffer& conflicts,
                    std::int64_t n_lanes, double synchronisation_ns, std::int64_t max_evaluations) {
  LaneProblem problem{std::move(launch_ns), {}, n_lanes, synchronisation_ns};
  const Integers fields = to_integers(conflicts, "conflicts");
  if (fields.size() % 2 != 0) throw PlanError("a conflict has two launches");
  for (std::size_t at = 0; at < fields.size(); at += 2) {
    problem.conflicts.emplace_back(fields[at], fields[at + 1]);
  }
  const GilReleased release;
  LaneSchedule found = schedule_lanes(problem, max_evaluations);
  std::vector<WaitFields> waits;
  waits.reserve(found.waits.size());
  for (const LaneWait& one : found.waits) waits.emplace_back(one.launch, one.ended);
  return {std::move(found.lanes),  std::move(waits),   std::move(found.joined),
          std::move(found.held),   found.predicted_ns, found.lower_bound_ns,
          std::move(found.method), found.n_evaluations};
}

void register_device_search(py::module_& module) {
  py::class_<DeviceSearch>(module, "DeviceSearch")
      .def(py::init([](std::size_t n_devices, Numbers costs_ns, std::vector<Integers> after,
                       double hand_over_ns, Integers memory_of, std::int64_t home,
                       const std::vector<LinkFields>& links,
                       const std::vector<ValueFields>& values) {
             return DeviceSearch(graph_of(n_devices, std::move(costs_ns), std::move(after),
                                          hand_over_ns, std::move(memory_of), home, links, values));
           }),
           py::arg("n_devices"), py::arg("costs_ns"), py::arg("after"), py::kw_only(),
           py::arg("hand_over_ns"), py::arg("memory_of"), py::arg("home"), py::arg("links"),
           py::arg("values"))
      .def(
          "value",
          [](DeviceSearch& self, const Integers& devices, Numbers paces, Numbers free_ns,
             bool is_throughput) {
            const DeviceLoads loads{std::move(paces), std::move(free_ns)};
            return self.value(devices, loads, objective_of(is_throughput));
          },
          py::arg("devices"), py::arg("paces"), py::arg("free_ns"), py::arg("is_throughput"))
      .def(
          "freed",
          [](DeviceSearch& self, const Integers& devices, Numbers paces, Numbers free_ns) {
            return self.freed(devices, {std::move(paces), std::move(free_ns)});
          },
          py::arg("devices"), py::arg("paces"), py::arg("free_ns"))
      .def(
          "begin",
          [](DeviceSearch& self, const std::vector<Integers>& choices, Numbers paces,
             Numbers free_ns, bool is_throughput) {
            self.begin(choices, {std::move(paces), std::move(free_ns)},
                       objective_of(is_throughput));
          },
          py::arg("choices"), py::arg("paces"), py::arg("free_ns"), py::arg("is_throughput"))
      .def("improve", &DeviceSearch::improve, py::arg("max_evaluations"))
      .def_property_readonly("found", &DeviceSearch::found)
      .def_property_readonly("found_value", &DeviceSearch::found_value);
}

// (kind, execution, segment or producer, device or memory, values)
using CommandFields =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::vector<std::int64_t>>;

void register_segment_dispatch(py::module_& module) {
  py::class_<SegmentDispatch>(module, "SegmentDispatch")
      .def(py::init([](std::size_t n_devices, Numbers costs_ns, std::vector<Integers> after,
                       double hand_over_ns, Integers memory_of, std::int64_t home,
                       const std::vector<LinkFields>& links, const std::vector<ValueFields>& values,
                       bool is_throughput) {
             return SegmentDispatch(
                 graph_of(n_devices, std::move(costs_ns), std::move(after), hand_over_ns,
                          std::move(memory_of), home, links, values),
                 objective_of(is_throughput));
           }),
           py::arg("n_devices"), py::arg("costs_ns"), py::arg("after"), py::kw_only(),
           py::arg("hand_over_ns"), py::arg("memory_of"), py::arg("home"), py::arg("links"),
           py::arg("values"), py::arg("is_throughput"))
      .def("add", &SegmentDispatch::add, py::arg("devices"))
      .def("segment_ended", &SegmentDispatch::segment_ended, py::arg("execution"),
           py::arg("segment"))
      .def("copy_ended", &SegmentDispatch::copy_ended, py::arg("execution"), py::arg("to"),
           py::arg("values"))
      .def("abandon", &SegmentDispatch::abandon, py::arg("execution"))
      .def(
          "next",
          [](SegmentDispatch& self, const Numbers& paces, double now_ns) {
            std::vector<CommandFields> found;
            for (DispatchCommand& one : self.next(paces, now_ns)) {
              found.emplace_back(static_cast<std::int64_t>(one.kind), one.execution, one.what,
                                 one.to, std::move(one.values));
            }
            return found;
          },
          py::arg("paces"), py::arg("now_ns"))
      .def("devices", &SegmentDispatch::devices, py::arg("execution"))
      .def_property_readonly("wake_at_ns", &SegmentDispatch::wake_at_ns)
      .def_property_readonly("n_moved", &SegmentDispatch::n_moved);
}

void register_dispatch_check(py::module_& module) {
  py::class_<DispatchRules>(module, "DispatchRules",
                            "What is the same in each execution of placed segments.")
      .def(py::init([](std::vector<Integers> inputs, std::vector<Integers> outputs,
                       std::vector<Integers> after, std::int64_t home, Integers returned,
                       std::size_t n_memories, Integers names) {
             DispatchRules rules{std::move(inputs),   std::move(outputs), std::move(after), home,
                                 std::move(returned), n_memories,         std::move(names)};
             rules.check();
             return rules;
           }),
           py::kw_only(), py::arg("inputs"), py::arg("outputs"), py::arg("after"), py::arg("home"),
           py::arg("returned"), py::arg("n_memories"), py::arg("names"));
  py::class_<DispatchCheck>(module, "DispatchCheck",
                            "Proves each step of one execution before it is taken.")
      .def(py::init<const DispatchRules&>(), py::arg("rules"), py::keep_alive<1, 2>())
      .def("copied", &DispatchCheck::copied, py::arg("producer"), py::arg("origin"),
           py::arg("target"), py::arg("values"))
      .def("arrived", &DispatchCheck::arrived, py::arg("target"), py::arg("values"))
      .def("begun", &DispatchCheck::begun, py::arg("segment"), py::arg("memory"))
      .def("ended", &DispatchCheck::ended, py::arg("segment"))
      .def("finished", &DispatchCheck::finished);
}

}  // namespace

void register_tasks(py::module_& module) {
  register_device_search(module);
  register_segment_dispatch(module);
  register_dispatch_check(module);
  module.def("place_tasks", &place, py::arg("costs_ns"), py::arg("memory_bytes"), py::arg("edges"),
             py::arg("links"), py::arg("limits_bytes"), py::arg("busy_watts"),
             py::arg("idle_watts"), py::kw_only(), py::arg("objective"), py::arg("max_slowdown"),
             py::arg("max_evaluations"), py::arg("seed"));
  module.def("moved_costs", &costs_elsewhere, py::arg("costs_ns"), py::arg("memory_bytes"),
             py::arg("edges"), py::arg("links"), py::arg("limits_bytes"), py::arg("busy_watts"),
             py::arg("idle_watts"), py::kw_only(), py::arg("objective"), py::arg("processors"),
             py::arg("order"), py::arg("groups"), py::arg("latency_limit_ns"));
  module.def("schedule_lanes", &schedule, py::arg("launch_ns"), py::arg("conflicts"), py::kw_only(),
             py::arg("n_lanes"), py::arg("synchronisation_ns"), py::arg("max_evaluations"));
  module.attr("DEFAULT_EVALUATIONS") = kDefaultEvaluations;
  module.attr("DEFAULT_PLACED_TASKS") = kDefaultPlacedTasks;
  module.attr("DEFAULT_LANE_EVALUATIONS") = kDefaultLaneEvaluations;
  module.attr("DEFAULT_PLACED_LAUNCHES") = kDefaultPlacedLaunches;
}

}  // namespace offload
