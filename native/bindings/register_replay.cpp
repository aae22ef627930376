#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "convert.hpp"
#include "offload/errors.hpp"
#include "registers.hpp"
#include "replay/replay.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Whether this thread is recording a call: executions inside it cannot be seen.
thread_local bool recording = false;

// One place in a call's arguments: a tensor, or a constant that must be the same again.
struct Place {
  bool is_tensor = false;
  py::object constant;

  // Appends the tensor at this place; false if something else stands there.
  bool take(PyObject* given, Tensors& tensors) const {
    if (is_tensor) {
      if (!THPVariable_Check(given)) return false;
      tensors.push_back(THPVariable_Unpack(given));
      return true;
    }
    if (given == constant.ptr()) return true;
    if (Py_TYPE(given) != Py_TYPE(constant.ptr())) return false;
    if (PyFloat_Check(given)) {  // by bits: -0.0 is not 0.0, and a NaN is itself
      const double one = PyFloat_AS_DOUBLE(given);
      const double other = PyFloat_AS_DOUBLE(constant.ptr());
      return std::memcmp(&one, &other, sizeof one) == 0;
    }
    if (PyComplex_Check(given)) return false;  // left to the Python side
    const int same = PyObject_RichCompareBool(given, constant.ptr(), Py_EQ);
    if (same < 0) PyErr_Clear();
    return same == 1;
  }
};

// How the results go back to the caller, and buffers for them come.
enum class ResultForm : std::uint8_t { kTensor, kList, kTuple, kOther };

// A replay with the Python side of its calls: how arguments are found and results handed out.
class PythonReplay {
 public:
  PythonReplay(std::shared_ptr<Replay> replay, const py::object& positional,
               const py::object& keyword, py::object match, const std::string& result_form,
               py::object build_result, py::object match_buffers, py::object current_stream,
               py::object draw, bool drains_queue)
      : replay_(std::move(replay)),
        match_(std::move(match)),
        build_(std::move(build_result)),
        match_buffers_(std::move(match_buffers)),
        current_stream_(std::move(current_stream)),
        draw_(std::move(draw)),
        drains_queue_(drains_queue) {
    plain_ = !positional.is_none();
    if (plain_) {
      for (const py::handle place : positional) positional_.push_back(to_place(place));
      for (const auto& item : keyword.cast<py::dict>()) {
        keyword_.emplace_back(py::reinterpret_borrow<py::object>(item.first),
                              to_place(item.second));
      }
    }
    form_ = result_form == "tensor"  ? ResultForm::kTensor
            : result_form == "list"  ? ResultForm::kList
            : result_form == "tuple" ? ResultForm::kTuple
                                     : ResultForm::kOther;
  }

  Replay& replay() const { return *replay_; }

  py::object execute(const py::tuple& args, const py::dict& kwargs, py::handle out,
                     py::handle feature_map) {
    const auto call = bound(args, kwargs, out, feature_map);
    {
      const py::gil_scoped_release release;
      replay_->execute(call);
    }
    return result(*call);
  }

  std::shared_ptr<Call> bound(const py::tuple& args, const py::dict& kwargs, py::handle out,
                              py::handle feature_map) {
    const std::uint64_t begin_ns = now_ns();
    auto call = std::make_shared<Call>();
    call->call_ns = begin_ns;
    take_tensors(args, kwargs, call->inputs);
    if (!out.is_none()) take_buffers(out, call->given_results);
    if (!feature_map.is_none()) call->feature_map = to_tensor(feature_map);
    if (recording) {
      throw CaptureError(
          "a captured program was executed inside a call that is being recorded, where its "
          "launches cannot be seen: call the model itself there");
    }
    if (replay_->closed()) throw ExecutionError("the executable is closed");
    if (replay_->streamed()) {
      bind_on_stream(*call);
    } else {
      bind_call(replay_->spec(), *call);
    }
    call->checked_ns = now_ns();
    return call;
  }

  py::object result(Call& call) const {
    Tensors tensors = results_of(replay_->spec(), call);
    if (form_ == ResultForm::kTensor) return from_tensor(std::move(tensors[0]));
    if (form_ == ResultForm::kTuple) {
      py::tuple items(tensors.size());
      for (std::size_t index = 0; index < tensors.size(); ++index) {
        items[index] = from_tensor(std::move(tensors[index]));
      }
      return items;
    }
    py::list items;
    for (at::Tensor& tensor : tensors) items.append(from_tensor(std::move(tensor)));
    return form_ == ResultForm::kList ? py::object(std::move(items)) : build_(std::move(items));
  }

 private:
  static Place to_place(py::handle place) {
    const auto pair = py::reinterpret_borrow<py::tuple>(place);
    return Place{pair[0].cast<bool>(), py::reinterpret_borrow<py::object>(pair[1])};
  }

  static void assign(const std::vector<at::Tensor>& found, Tensors& tensors) {
    tensors.assign(found.begin(), found.end());
  }

  void take_tensors(const py::tuple& args, const py::dict& kwargs, Tensors& tensors) const {
    if (plain_ && take_plain(args, kwargs, tensors)) return;
    assign(to_tensors(match_(args, kwargs)), tensors);
  }

  // The frequent case, without a Python frame: tensors and constants as recorded.
  bool take_plain(const py::tuple& args, const py::dict& kwargs, Tensors& tensors) const {
    if (args.size() != positional_.size() || kwargs.size() != keyword_.size()) return false;
    tensors.reserve(replay_->spec().inputs.size());
    for (std::size_t index = 0; index < positional_.size(); ++index) {
      PyObject* const given = PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(index));
      if (!positional_[index].take(given, tensors)) return tensors.clear(), false;
    }
    for (const auto& [name, place] : keyword_) {
      PyObject* const given = PyDict_GetItemWithError(kwargs.ptr(), name.ptr());
      if (given == nullptr || !place.take(given, tensors)) return tensors.clear(), false;
    }
    return true;
  }

  void take_buffers(py::handle out, Tensors& buffers) const {
    if (!take_plain(out.ptr(), buffers)) assign(to_tensors(match_buffers_(out)), buffers);
  }

  // Buffers nested like a result that is a tensor, or a list or tuple of tensors.
  bool take_plain(PyObject* out, Tensors& buffers) const {
    if (form_ == ResultForm::kTensor) {
      if (!THPVariable_Check(out)) return false;
      buffers.push_back(THPVariable_Unpack(out));
      return true;
    }
    if (form_ == ResultForm::kOther || !(PyList_CheckExact(out) || PyTuple_CheckExact(out)) ||
        static_cast<std::size_t>(PySequence_Fast_GET_SIZE(out)) != replay_->spec().results.size()) {
      return false;
    }
    buffers.resize(replay_->spec().results.size());
    for (std::size_t index = 0; index < buffers.size(); ++index) {
      PyObject* const one = PySequence_Fast_GET_ITEM(out, static_cast<Py_ssize_t>(index));
      if (one == Py_None) continue;
      if (!THPVariable_Check(one)) return buffers.clear(), false;
      buffers[index] = THPVariable_Unpack(one);
    }
    return true;
  }

  // Binds on the executable's device, and notes the caller's current stream there: by the driver's
  // handle, and as torch names it for a lane's thread. (Tests have devices that torch takes for
  // the CPU.)
  void bind_on_stream(Call& call) const {
    const CallSpec& spec = replay_->spec();
    const c10::OptionalDeviceGuard guard(spec.device.has_index() ? std::optional(spec.device)
                                                                 : std::nullopt);
    bind_call(spec, call);
    check_devices(spec, call);
    const int index = spec.device.has_index() ? spec.device.index() : 0;
    call.drains_queue = drains_queue_;
    if (drains_queue_) call.drain.begin_ns = now_ns();
    call.stream = current_stream_(index).cast<std::uint64_t>();
    if (drains_queue_) call.drain.end_ns = now_ns();
    if (!spec.device.is_cpu()) {
      const c10::impl::VirtualGuardImpl device(spec.device.type());
      call.torch_stream = device.getStream(device.getDevice());
    }
    if (!draw_.is_none()) {
      replay_->check_ready();  // a draw cannot be taken back
      call.random = draw_().cast<std::vector<std::uint64_t>>();
    }
  }

  std::shared_ptr<Replay> replay_;
  bool plain_ = false;
  std::vector<Place> positional_;
  std::vector<std::pair<py::object, Place>> keyword_;
  py::object match_;
  ResultForm form_;
  py::object build_;
  py::object match_buffers_;
  py::object current_stream_;  // None: the device has no streams
  py::object draw_;            // None: no kernel reads the state of a generator
  bool drains_queue_;          // current_stream_ waits until torch has delivered what it queues
};

// A submitted execution, with what its result is made of.
class PythonTicket {
 public:
  PythonTicket(py::object replay, std::shared_ptr<Call> call, std::shared_ptr<Ticket> ticket)
      : replay_(std::move(replay)), call_(std::move(call)), ticket_(std::move(ticket)) {}

  bool done() const { return ticket_->done(); }

  void wait() const {
    const std::shared_ptr<Ticket> ticket = ticket_;
    const py::gil_scoped_release release;
    ticket->wait();
  }

  py::object result() {
    wait();
    if (!result_) {
      py::object built = replay_.cast<PythonReplay&>().result(*call_);
      if (!result_) result_ = std::move(built);  // another thread may have come first
    }
    return result_;
  }

 private:
  py::object replay_;
  std::shared_ptr<Call> call_;
  std::shared_ptr<Ticket> ticket_;
  py::object result_;
};

std::unique_ptr<PythonReplay> make_replay(CallSpec spec, std::vector<Trigger> triggers,
                                          std::shared_ptr<Resident> resident, bool host_scheduled,
                                          const py::object& positional, const py::object& keyword,
                                          py::object match, const std::string& result_form,
                                          py::object build_result, py::object match_buffers,
                                          py::object current_stream, py::object draw,
                                          bool drains_queue) {
  std::shared_ptr<Replay> replay(
      new Replay(std::move(spec), std::move(triggers), std::move(resident), host_scheduled,
                 /*streamed=*/!current_stream.is_none()),
      delete_without_gil<Replay>);
  return std::make_unique<PythonReplay>(std::move(replay), positional, keyword, std::move(match),
                                        result_form, std::move(build_result),
                                        std::move(match_buffers), std::move(current_stream),
                                        std::move(draw), drains_queue);
}

}  // namespace

void register_replay(py::module_& module) {
  py::enum_<Trigger>(module, "Trigger")
      .value("IO", Trigger::kIo)
      .value("FEATURE_MAP", Trigger::kFeatureMap)
      .value("WEIGHT", Trigger::kWeight)
      .value("INTERNAL", Trigger::kInternal);
  py::class_<PythonTicket>(module, "Ticket")
      .def("done", &PythonTicket::done)
      .def("wait", &PythonTicket::wait)
      .def("result", &PythonTicket::result);
  py::class_<PythonReplay>(module, "Replay")
      .def(py::init(&make_replay), py::kw_only(), py::arg("spec"), py::arg("triggers"),
           py::arg("resident"), py::arg("host_scheduled"), py::arg("positional"),
           py::arg("keyword"), py::arg("match"), py::arg("result_form"), py::arg("build_result"),
           py::arg("match_buffers"), py::arg("current_stream") = py::none(),
           py::arg("draw") = py::none(), py::arg("drains_queue") = false)
      .def("execute", &PythonReplay::execute, py::arg("args"), py::arg("kwargs"), py::arg("out"),
           py::arg("feature_map"))
      .def(
          "submit",
          [](py::object self, const py::tuple& args, const py::dict& kwargs, const py::object& out,
             const py::object& feature_map) {
            auto& replay = self.cast<PythonReplay&>();
            auto call = replay.bound(args, kwargs, out, feature_map);
            auto ticket = replay.replay().submit(call);
            return PythonTicket(std::move(self), std::move(call), std::move(ticket));
          },
          py::arg("args"), py::arg("kwargs"), py::arg("out"), py::arg("feature_map"))
      .def(
          "wait_for_submitted", [](PythonReplay& self) { self.replay().wait_for_submitted(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "rebind_weights", [](PythonReplay& self) { self.replay().rebind_weights(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "close",
          [](PythonReplay& self) {
            {
              const py::gil_scoped_release release;
              self.replay().close();
            }
            self.replay().release_buffers();  // calls are bound under the GIL, and before the close
          })
      .def_property_readonly("closed", [](PythonReplay& self) { return self.replay().closed(); })
      .def_property_readonly("last_execution",
                             [](PythonReplay& self) { return self.replay().last_execution(); })
      .def_property_readonly("substages",
                             [](PythonReplay& self) { return self.replay().substages(); })
      .def_property_readonly("last_traced",
                             [](PythonReplay& self) { return self.replay().last_traced(); })
      .def("start_trace", [](PythonReplay& self) { self.replay().start_trace(); })
      .def(
          "stop_trace", [](PythonReplay& self) { return self.replay().stop_trace(); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("trace_clock_reads",
                             [](PythonReplay& self) { return self.replay().trace_clock_reads(); });
  module.def(
      "set_recording", [](bool value) { recording = value; }, py::arg("recording"),
      "Refuse executions on this thread while it records a call.");
  // A launch may need the GIL to end, and fork waits for launches.
  Lane::set_fork_hooks(
      []() -> void* {
        return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
      },
      [](void* state) {
        if (state != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
      });
  module.def(
      "close_all_lanes", [] { Lane::close_all(); }, py::call_guard<py::gil_scoped_release>(),
      "End every worker thread; called once, when the interpreter exits.");
}

}  // namespace offload
