#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "gil.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"
#include "python_replay.hpp"
#include "python_ticket.hpp"
#include "raised_in_python.hpp"
#include "registers.hpp"
#include "run/dispatched_execution.hpp"
#include "segment_graph_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Keeps a Python object for owners that release it on any thread.
std::shared_ptr<const py::object> kept(py::object object) {
  return {new py::object(std::move(object)), [](const py::object* one) {
            const GilHeld held;
            delete one;
          }};
}

// Calls a function of Python's with the GIL; what it raises can be rethrown on any thread.
template <typename Function>
auto called(Function function) {
  const GilHeld held;
  try {
    return function();
  } catch (py::error_already_set& error) {
    throw RaisedInPython(error.value());
  }
}

using Lanes = std::vector<std::shared_ptr<Lane>>;

// Queues work on a link. Throws ExecutionError once it is closed.
void submit_to(Lane& link, std::function<void()> work, std::shared_ptr<Ticket> ticket) {
  try {
    link.submit(std::move(work), std::move(ticket));
  } catch (const std::logic_error&) {
    throw ExecutionError(
        "no copies between devices are made once the executable is closed, or while the "
        "interpreter is exiting");
  }
}

// (replay, executable, cost in ns, is it timed, draw or None, has it buffers); or None.
DispatchSite to_site(const py::handle& given) {
  if (given.is_none()) return {};
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  DispatchSite site;
  site.replay = parts[0].cast<const PythonReplay&>().replay().shared_from_this();
  site.keep = kept(py::make_tuple(parts[0], parts[1]));
  site.cost_ns = parts[2].cast<double>();
  site.is_timed = parts[3].cast<bool>();
  if (!parts[4].is_none()) {
    site.draw = [draw = kept(parts[4])] {
      return called([&] { return (*draw)().cast<std::vector<std::uint64_t>>(); });
    };
  }
  site.has_buffers = parts[5].cast<bool>();
  return site;
}

// (device, (stream's id, index, type) or None, is it pinned)
DispatchMemory to_memory(const py::handle& given) {
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  DispatchMemory memory;
  memory.device = c10::Device(parts[0].cast<std::string>());
  if (!parts[1].is_none()) {
    const auto [id, index, type] = parts[1].cast<std::tuple<std::int64_t, int, int>>();
    memory.stream = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index),
                                         static_cast<c10::DeviceType>(type));
  }
  memory.is_pinned = parts[2].cast<bool>();
  return memory;
}

// (layout, bytes, is it returned, group)
DispatchValue to_value(const py::handle& given) {
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  return {parts[0].cast<TensorLayout>(), parts[1].cast<std::size_t>(), parts[2].cast<bool>(),
          parts[3].cast<std::size_t>()};
}

// A copy that is queued. Its task drops all of it with the GIL.
struct QueuedCopy {
  std::shared_ptr<const py::object> copy;
  std::shared_ptr<const void> context;
  std::int64_t producer, origin, target;
  Integers names;
  std::vector<CopyPiece> pieces;
};

// copy(context, producer, origin, target, values, pieces): copies, and returns when that has ended.
void carry_out(QueuedCopy one) {
  py::list pieces;
  for (CopyPiece& piece : one.pieces) {
    pieces.append(py::make_tuple(from_tensor(std::move(piece.from)),
                                 from_tensor(std::move(piece.to)), piece.size_bytes));
  }
  const auto& context = *static_cast<const py::object*>(one.context.get());
  (*one.copy)(context, one.producer, one.origin, one.target, one.names, pieces);
}

// Queues copies on the links' threads, which alone need the GIL.
QueueCopies to_copy(py::object copy, const Integers& names, Lanes links, std::size_t n_memories) {
  return [copy = kept(std::move(copy)), names, links = std::move(links), n_memories](
             const DispatchedExecution& execution, std::int64_t producer, std::int64_t origin,
             std::int64_t target, const Integers& values, std::vector<CopyPiece> pieces) {
    const auto one = std::make_shared<QueuedCopy>(
        QueuedCopy{copy, execution.context, producer, origin, target, {}, std::move(pieces)});
    for (const std::int64_t value : values) {
      one->names.push_back(names[static_cast<std::size_t>(value)]);
    }
    const auto ticket = std::make_shared<Ticket>();
    const auto& link =
        links.at(static_cast<std::size_t>(origin) * n_memories + static_cast<std::size_t>(target));
    submit_to(*link, [one] { called([&] { carry_out(std::move(*one)); }); }, ticket);
    return ticket;
  };
}

// The arguments that are those of a SegmentGraph.
SegmentGraph to_graph(const py::dict& graph) {
  return graph_of(graph["n_devices"].cast<std::size_t>(), graph["costs_ns"].cast<Numbers>(),
                  graph["after"].cast<std::vector<Integers>>(),
                  graph["hand_over_ns"].cast<double>(), graph["memory_of"].cast<Integers>(),
                  graph["home"].cast<std::int64_t>(),
                  graph["links"].cast<std::vector<LinkFields>>(),
                  graph["values"].cast<std::vector<ValueFields>>());
}

// A dispatcher and what its executions share.
struct TensorDispatcher {
  std::shared_ptr<const DispatchSpec> spec;
  std::shared_ptr<SegmentDispatcher> native;
};

TensorDispatcher make_dispatcher(const py::dict& graph, bool is_throughput,
                                 std::vector<Integers> inputs, std::vector<Integers> outputs,
                                 Integers names, const py::list& values,
                                 std::vector<Integers> groups, std::vector<Integers> shared,
                                 const py::list& sites, const py::list& memories, Integers given,
                                 std::shared_ptr<DevicePaces> paces, py::object copy, Lanes links) {
  auto spec = std::make_shared<DispatchSpec>();
  spec->graph = to_graph(graph);
  spec->objective = objective_of(is_throughput);
  for (const py::handle one : memories) spec->memories.push_back(to_memory(one));
  for (const py::handle one : values) spec->values.push_back(to_value(one));
  for (const py::handle one : sites) spec->sites.push_back(to_site(one));
  DispatchRules& rules = spec->rules;
  rules.inputs = std::move(inputs);
  rules.outputs = std::move(outputs);
  rules.after = spec->graph.after;
  rules.home = spec->graph.home;
  rules.n_memories = spec->memories.size();
  rules.names = std::move(names);
  for (const Integers& made : rules.outputs) {
    for (const std::int64_t value : made) {
      if (spec->values.at(static_cast<std::size_t>(value)).is_returned) {
        rules.returned.push_back(value);
      }
    }
  }
  spec->groups = std::move(groups);
  spec->shared = std::move(shared);
  spec->given = std::move(given);
  spec->paces = std::move(paces);
  if (links.size() != rules.n_memories * rules.n_memories) {
    throw PlanError("the dispatch of segments: expected a link between any two memories");
  }
  spec->copy = to_copy(std::move(copy), rules.names, std::move(links), rules.n_memories);
  spec->with_gil = [](const std::function<void()>& function) {
    const GilHeld held;
    function();
  };
  spec->without_gil = [](const std::function<void()>& function) {
    if (PyGILState_Check() == 0) return function();
    const GilReleased release;
    function();
  };
  spec->check();
  return {spec, std::make_shared<SegmentDispatcher>(spec)};
}

std::shared_ptr<DispatchedExecution> prepared(
    const TensorDispatcher& self, const py::list& inputs, std::vector<Surroundings> asked,
    const std::vector<std::vector<const PythonTicket*>>& refreshed,
    std::shared_ptr<HeldStorages> pins, const PythonTicket& done) {
  std::vector<std::vector<std::shared_ptr<Ticket>>> waits(refreshed.size());
  for (std::size_t memory = 0; memory < refreshed.size(); ++memory) {
    for (const PythonTicket* one : refreshed[memory]) waits[memory].push_back(one->ticket());
  }
  return std::make_shared<DispatchedExecution>(self.spec, to_tensors(inputs), std::move(asked),
                                               std::move(waits), std::move(pins), done.ticket());
}

// The tensors that the caller receives, by the index of their Value in the Program.
py::dict returned(const TensorDispatcher& self, DispatchedExecution& execution) {
  py::dict found;
  for (const std::int64_t value : self.spec->rules.returned) {
    const std::int64_t name = self.spec->rules.names[static_cast<std::size_t>(value)];
    found[py::int_(name)] = from_tensor(execution.held(value, self.spec->graph.home));
  }
  return found;
}

// A method that notes a duration, for devices that exist.
auto of_device(void (DevicePaces::*note)(std::size_t, double, double)) {
  return [note](DevicePaces& self, std::size_t device, double expected_ns, double took_ns) {
    if (device >= self.size()) throw PlanError("the device does not exist");
    (self.*note)(device, expected_ns, took_ns);
  };
}

void register_device_paces(py::module_& module) {
  py::class_<DevicePaces, std::shared_ptr<DevicePaces>>(
      module, "DevicePaces", "By device, the measured duration of its segments over the expected.")
      .def(py::init<const std::vector<double>&>(), py::arg("paces"))
      .def_property_readonly("values", &DevicePaces::values)
      .def("observe", of_device(&DevicePaces::observe), py::arg("device"), py::arg("expected_ns"),
           py::arg("took_ns"))
      .def("observe_at_once", of_device(&DevicePaces::observe_at_once), py::arg("device"),
           py::arg("expected_ns"), py::arg("took_ns"))
      .def(
          "forget",
          [](DevicePaces& self, const std::vector<bool>& observed) {
            if (observed.size() != self.size()) throw PlanError("expected one of each device");
            self.forget(observed);
          },
          py::arg("observed"))
      .def("begin_execution", &DevicePaces::begin_execution)
      .def("end_execution", &DevicePaces::end_execution)
      .def_property_readonly("n_under_way", &DevicePaces::n_under_way)
      .def("notice_fork", &DevicePaces::notice_fork);
}

}  // namespace

void register_copy_link(py::module_& module) {
  py::class_<Lane, std::shared_ptr<Lane>>(module, "CopyLink",
                                          "A thread that copies between two memories, in order.")
      .def(py::init([] { return std::shared_ptr<Lane>(new Lane, delete_without_gil<Lane>); }))
      .def(
          "submit",
          [](Lane& self, py::object copy) {
            submit_to(
                self, [copy = kept(std::move(copy))] { called([&] { (*copy)(); }); }, nullptr);
          },
          py::arg("copy"), "Queues a function, whose error is lost.")
      .def("close", &Lane::close, py::call_guard<GilReleased>(),
           "Waits for what is queued; later submissions raise an ExecutionError.");
}

void register_segment_dispatcher(py::module_& module) {
  register_device_paces(module);
  register_copy_link(module);
  py::class_<DispatchedExecution, std::shared_ptr<DispatchedExecution>>(module,
                                                                        "DispatchedExecution");
  py::class_<TensorDispatcher>(module, "SegmentDispatcher",
                               "Begins segments on devices when they are ready.")
      .def(py::init(&make_dispatcher), py::kw_only(), py::arg("graph"), py::arg("is_throughput"),
           py::arg("inputs"), py::arg("outputs"), py::arg("names"), py::arg("values"),
           py::arg("groups"), py::arg("shared"), py::arg("sites"), py::arg("memories"),
           py::arg("given"), py::arg("paces"), py::arg("copy"), py::arg("links"))
      .def("prepare", &prepared, py::arg("inputs"), py::arg("asked"), py::arg("refreshed"),
           py::arg("pins"), py::arg("done"))
      .def("returned", &returned, py::arg("execution"))
      .def(
          "add",
          [](TensorDispatcher& self, std::shared_ptr<DispatchedExecution> execution,
             Integers devices, py::object context) {
            execution->context = kept(std::move(context));
            const GilReleased release;
            self.native->add(std::move(execution), std::move(devices));
          },
          py::arg("execution"), py::arg("devices"), py::arg("context"))
      .def("measure", [](TensorDispatcher& self) { self.native->measure(); })
      .def_property_readonly(
          "measured",
          [](const TensorDispatcher& self) {
            const auto& [acting_ns, submitting_ns, ending_ns, n_segments] = self.native->measured();
            return py::make_tuple(acting_ns.load(), submitting_ns.load(), ending_ns.load(),
                                  n_segments.load());
          },
          "Processor time of acting; within it, of submissions and of callbacks, in ns; and "
          "segments.")
      .def("abandon", [](TensorDispatcher& self) { self.native->abandon(); })
      .def_property_readonly(
          "is_inside_launch",
          [](const TensorDispatcher& self) { return self.spec->is_inside_launch(); })
      .def_property_readonly(
          "n_under_way", [](const TensorDispatcher& self) { return self.native->n_under_way(); })
      .def_property_readonly("n_moved",
                             [](const TensorDispatcher& self) { return self.native->n_moved(); });
}

}  // namespace offload
