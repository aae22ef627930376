#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "callable_replay.hpp"
#include "convert.hpp"
#include "gil.hpp"
#include "python_replay.hpp"
#include "python_ticket.hpp"
#include "registers.hpp"
#include "run/caller_state.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// (instances, axes, find, promotions or None); or None.
std::optional<VaryingSizes> to_sizes(const py::object& given) {
  if (given.is_none()) return std::nullopt;
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  VaryingSizes sizes{parts[0].cast<std::shared_ptr<Instances>>(),
                     0,
                     {},
                     parts[2],
                     parts[3].cast<std::shared_ptr<Promotions>>()};
  sizes.n_dims = sizes.instances->n_dims();
  using Axis = std::tuple<std::size_t, std::size_t, std::size_t>;
  for (const auto& [dim, input, axis] : parts[1].cast<std::vector<Axis>>()) {
    sizes.axes.push_back({dim, input, axis});
  }
  return sizes;
}

std::unique_ptr<PythonReplay> make_replay(
    CallSpec spec, std::vector<Trigger> triggers, std::shared_ptr<Resident> resident,
    bool host_scheduled, const py::object& positional, const py::object& keyword, py::object match,
    const std::string& result_form, py::object build_result, py::object match_buffers,
    py::object check_feature_map, py::object current_stream, py::object draw, bool drains_queue,
    const py::object& caller, py::object warn_of_gradients, const py::object& sizes) {
  std::shared_ptr<Replay> replay;
  {
    const GilReleased release;  // a thread that forks holds each lane, and waits for the GIL
    replay.reset(
        new Replay(std::move(spec), std::move(triggers), std::move(resident), host_scheduled),
        delete_without_gil<Replay>);
  }
  if (!current_stream.is_none() && !replay->has_streams()) {
    throw std::invalid_argument("the caller's stream is for a resident on a device with streams");
  }
  if (replay->has_generators() == draw.is_none()) {
    throw std::invalid_argument(
        "states of generators are drawn for a resident whose kernels read them, and for no other");
  }
  std::optional<RecordedCaller> recorded;
  if (!caller.is_none()) {
    const auto [state, root, training] = caller.cast<std::tuple<std::uint64_t, py::object, bool>>();
    recorded = RecordedCaller{state, root, training};
  }
  return std::make_unique<PythonReplay>(
      std::move(replay), positional, keyword, result_form,
      PythonSide{std::move(match), std::move(build_result), std::move(match_buffers),
                 std::move(check_feature_map), std::move(current_stream), std::move(draw),
                 drains_queue, std::move(recorded), std::move(warn_of_gradients)},
      to_sizes(sizes));
}

// (stream id, device index, device type), as torch.Stream takes them; or None.
py::object to_python(const std::optional<c10::Stream>& stream) {
  if (!stream) return py::none();
  return py::make_tuple(stream->id(), static_cast<int>(stream->device_index()),
                        static_cast<int>(stream->device_type()));
}

// What a thread has given up while it waits for others.
struct GivenUp {
  PyThreadState* state;
  bool has_imports;  // it had Python's lock of imports, as a thread that forks has
};

// Calls a function of _imp; returns whether it succeeded.
bool call_imports(const char* function) {
  const py::error_scope kept;                           // a thread may be handling an error
  PyObject* const module = PyImport_AddModule("_imp");  // borrowed; importlib has it
  PyObject* const result =
      module == nullptr ? nullptr : PyObject_CallMethod(module, function, nullptr);
  Py_XDECREF(result);
  PyErr_Clear();
  return result != nullptr;
}

// Gives up the GIL, if this thread has it, and the lock of imports: a launch may import, too.
void* release_for_launches() {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return nullptr;
  const bool had_imports = call_imports("release_lock");
  return new GivenUp{PyEval_SaveThread(), had_imports};
}

void acquire_again(void* given_up) {
  const std::unique_ptr<GivenUp> before(static_cast<GivenUp*>(given_up));
  if (!before) return;
  take_gil([&before] { PyEval_RestoreThread(before->state); });
  if (before->has_imports) call_imports("acquire_lock");
}

// Threads between `hold_for_fork` and the end of their fork, and whether Python collected garbage
// before. With the GIL.
int n_forking = 0;
bool collected_before_forks = false;

// Until the fork the collector might drop an executable, whose locks are held.
void hold_for_fork() {
  Lane::hold_for_fork();
  const bool collected = PyGC_Disable() != 0;
  if (n_forking++ == 0) collected_before_forks = collected;
}

void release_after_fork() {
  Lane::release_after_fork();
  if (n_forking > 0 && --n_forking == 0 && collected_before_forks) PyGC_Enable();
}

// The child has this thread alone.
void begin_in_child() {
  n_forking = std::min(n_forking, 1);
  release_after_fork();
  Lane::drop_abandoned();
}

constexpr const char* kWait = R"(Block until it has ended, for at most `timeout` seconds.

Raises:
    TimeoutError: it has not ended by then, and goes on.
    concurrent.futures.CancelledError: it was cancelled.
    DependencyError: what it depends on failed.
    ExecutionError: a launch failed; or a done-callback, or a launch, waits for what its own thread
        has to do.
    CaptureError: an operator laid its result out otherwise than it was recorded.
    BindingError: a guard found another value than the recorded one; or an argument that was not
        known at the submission does not fit.
    Exception: what the callable of a task raised.)";

constexpr const char* kResult =
    R"(Wait, and return what the model or the callable returns; the same objects at each call.

Raises:
    Exception: as `wait`.)";

void register_ticket(py::module_& module) {
  const auto timeout = py::arg("timeout") = py::none();
  py::class_<PythonTicket>(module, "Ticket")
      .def(py::init<>())
      .def(
          "done", [](const PythonTicket& self) { return self.ticket()->done(); },
          "Whether it has ended, well or not, or was cancelled.")
      .def(
          "running", [](const PythonTicket& self) { return self.ticket()->running(); },
          "Whether it has begun and not ended.")
      .def("cancelled", &PythonTicket::cancelled,
           "Whether it was cancelled, or what it depends on was.")
      .def(
          "cancel", [](const PythonTicket& self) { return self.ticket()->cancel(); },
          "Cancel it, if it has not begun; what it depends on goes on. Whether it is cancelled.")
      .def("wait", &PythonTicket::wait, timeout, kWait)
      .def("result", &PythonTicket::result, timeout, kResult)
      .def("_begin", [](const PythonTicket& self) { return self.ticket()->begin(); })
      .def("_outcome", &PythonTicket::outcome, timeout)
      .def("_wait_soon", &PythonTicket::wait_soon)
      .def_property_readonly("_is_told", &PythonTicket::is_told)
      .def("_tell", &PythonTicket::tell)
      .def("_issued_to", [](const PythonTicket& self) { return to_python(self.issued_to()); })
      .def("_set_result", &PythonTicket::set_result, py::arg("result"))
      .def("_set_error", &PythonTicket::set_error, py::arg("error"))
      .def("_fail_as", &PythonTicket::fail_as, py::arg("other"))
      .def("_call_when_done", &PythonTicket::add_done_callback, py::arg("function"));
  py::class_<Surroundings>(module, "Surroundings");
}

}  // namespace

void register_replay(py::module_& module) {
  py::enum_<Trigger>(module, "Trigger")
      .value("IO", Trigger::kIo)
      .value("FEATURE_MAP", Trigger::kFeatureMap)
      .value("WEIGHT", Trigger::kWeight)
      .value("INTERNAL", Trigger::kInternal);
  register_ticket(module);
  py::class_<PythonReplay>(module, "Replay")
      .def(py::init(&make_replay), py::kw_only(), py::arg("spec"), py::arg("triggers"),
           py::arg("resident"), py::arg("host_scheduled"), py::arg("positional"),
           py::arg("keyword"), py::arg("match"), py::arg("result_form"), py::arg("build_result"),
           py::arg("match_buffers"), py::arg("check_feature_map"),
           py::arg("current_stream") = py::none(), py::arg("draw") = py::none(),
           py::arg("drains_queue") = false, py::arg("caller") = py::none(),
           py::arg("warn_of_gradients") = py::none(), py::arg("sizes") = py::none())
      .def("set_deferred", &PythonReplay::set_deferred, py::arg("n_deferred"), py::arg("wait"))
      .def(
          "join",
          [](PythonReplay& self, const PythonReplay& other) { self.replay().join(other.replay()); },
          py::arg("other"), "Execute in turn with another Replay, on its lane and in its arena.")
      .def(
          "surroundings", [](const PythonReplay& self) { return self.surroundings(nullptr); },
          "This thread's state, after comparing it with that of the recording.")
      .def(
          "checked",
          [](const PythonReplay& self, const py::tuple& args, const py::dict& kwargs,
             const Surroundings& asked) { return self.checked({args.ptr(), kwargs.ptr()}, asked); },
          py::arg("args"), py::arg("kwargs"), py::arg("asked"),
          "The tensors of a call, checked as an execution would; nothing is executed or copied.")
      .def(
          "wait_for_submitted", [](PythonReplay& self) { self.replay().wait_for_submitted(); },
          py::call_guard<GilReleased>())
      .def(
          "rebind_weights", [](PythonReplay& self) { self.replay().rebind_weights(); },
          py::call_guard<GilReleased>())
      .def(
          "check_layouts",
          [](const PythonReplay& self) {
            for (const WeightSpec& weight : self.replay().spec().weights) {
              check_laid_out_as_recorded(weight);
            }
          },
          "Refuse what rebind_weights would refuse; change nothing.")
      .def("close",
           [](PythonReplay& self) {
             bool is_done = false;
             {
               const GilReleased release;
               is_done = self.replay().close();
             }
             // Calls are bound under the GIL, and before the close.
             if (is_done) self.replay().release_buffers();
             return is_done;
           })
      .def_property_readonly("closed", [](PythonReplay& self) { return self.replay().closed(); })
      .def_property_readonly("is_inside_launch",
                             [](PythonReplay& self) { return self.replay().is_inside_launch(); })
      .def_property_readonly("proof", [](PythonReplay& self) { return self.replay().proof(); })
      .def_property_readonly("last_execution",
                             [](PythonReplay& self) { return self.replay().last_execution(); })
      .def_property_readonly(
          "arena", py::cpp_function([](PythonReplay& self) { return self.replay().arena(); },
                                    py::call_guard<GilReleased>()))
      .def_property_readonly("substages",
                             [](PythonReplay& self) { return self.replay().substages(); })
      .def_property_readonly("last_traced",
                             [](PythonReplay& self) { return self.replay().last_traced(); })
      .def("start_trace", [](PythonReplay& self) { self.replay().start_trace(); })
      .def(
          "stop_trace", [](PythonReplay& self) { return self.replay().stop_trace(); },
          py::call_guard<GilReleased>())
      .def_property_readonly("trace_clock_reads",
                             [](PythonReplay& self) { return self.replay().trace_clock_reads(); });
  module.attr("CallableReplay") = make_callable_replay();
  module.def("set_recording", &set_recording, py::arg("recording"),
             "Refuse executions on this thread while it records a call.");
  module.def(
      "caller_state",
      [](const std::string& device) {
        return caller_state(c10::Device(device).type(), c10::impl::tls_local_dispatch_key_set());
      },
      py::arg("device"),
      "Autocast and the default dtype on this thread now, in one word that a Replay compares.");
  module.def("n_accumulation_hooks", &n_accumulation_hooks, py::arg("tensor"),
             "How many hooks the accumulation of a leaf's gradient has.");
  module.def("active_transform", &active_transform,
             "What transforms or traces the calls of this thread, for people; or empty.");
  // A launch may need the GIL to end, and fork waits for launches.
  Lane::set_fork_hooks(&release_for_launches, &acquire_again);
  module.def("hold_for_fork", &hold_for_fork,
             "Wait until no launch runs, and keep it so; called before a fork.");
  module.def("release_after_fork", &release_after_fork,
             "End what `hold_for_fork` began; called in the parent after a fork.");
  module.def("begin_in_child", &begin_in_child,
             "The same, and drop queued work of the parent; called in the child of a fork.");
  module.def(
      "close_all_lanes", [] { Lane::close_all(); }, py::call_guard<GilReleased>(),
      "End every worker thread; called once, when the interpreter exits.");
}

}  // namespace offload
