#include "python_replay.hpp"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "convert.hpp"
#include "gil.hpp"
#include "offload/dtype_name.hpp"
#include "offload/errors.hpp"
#include "run/caller_state.hpp"

namespace py = pybind11;

namespace offload {
namespace {

thread_local bool is_recording = false;

// The referent of a weak reference; null if it was deleted.
py::object referent(const py::object& reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference.ptr(), &found);
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* const found = PyWeakref_GetObject(reference.ptr());
  return found == Py_None ? py::object() : py::reinterpret_borrow<py::object>(found);
#endif
}

// Whether the referenced module is in another mode than `training`; false if it was deleted. Reads
// the instance's attribute, as nn.Module sets it, without consulting its class.
bool is_in_other_mode(const py::object& root, bool training) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  const py::object module = referent(root);
  if (!module) return false;
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  PyObject* const found =
      attributes ? PyDict_GetItemWithError(attributes.ptr(), name) : nullptr;  // borrowed
  if (found == nullptr) return PyErr_Clear(), false;
  if (found == (training ? Py_True : Py_False)) return false;
  const int now = PyObject_IsTrue(found);
  if (now < 0) throw py::error_already_set();
  return (now == 1) != training;
}

}  // namespace

void set_recording(bool value) noexcept { is_recording = value; }

bool PythonReplay::Place::take(PyObject* given, Tensors& tensors, Sizes& sizes) const {
  if (dim) {
    if (!PyLong_CheckExact(given)) return false;
    int overflow = 0;
    const long long size = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow != 0 || sizes[*dim].value_or(size) != size) return false;
    sizes[*dim] = size;
    return true;
  }
  if (is_tensor) {
    if (!THPVariable_CheckExact(given)) return false;  // subclasses are left to the Python side
    tensors.push_back(THPVariable_Unpack(given));
    return true;
  }
  if (given == constant.ptr()) return true;
  if (Py_TYPE(given) != Py_TYPE(constant.ptr())) return false;
  if (PyFloat_Check(given)) {  // by bits: -0.0 is not 0.0, and a NaN equals itself
    const double one = PyFloat_AS_DOUBLE(given);
    const double other = PyFloat_AS_DOUBLE(constant.ptr());
    return std::memcmp(&one, &other, sizeof one) == 0;
  }
  if (PyComplex_Check(given)) return false;  // left to the Python side
  const int same = PyObject_RichCompareBool(given, constant.ptr(), Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

PythonReplay::PythonReplay(std::shared_ptr<Replay> replay, const py::object& positional,
                           const py::object& keyword, const std::string& result_form,
                           PythonSide python, std::optional<VaryingSizes> sizes)
    : replay_(std::move(replay)),
      plain_(!positional.is_none()),
      python_(std::move(python)),
      sizes_(std::move(sizes)),
      warns_of_gradients_(!python_.warn_of_gradients.is_none()) {
  if (plain_) {
    for (const py::handle place : positional) positional_.push_back(to_place(place));
    for (const auto& item : keyword.cast<py::dict>()) {
      keyword_.emplace_back(py::reinterpret_borrow<py::object>(item.first), to_place(item.second));
    }
  }
  form_ = result_form == "tensor"  ? ResultForm::kTensor
          : result_form == "list"  ? ResultForm::kList
          : result_form == "tuple" ? ResultForm::kTuple
                                   : ResultForm::kOther;
  const CallSpec& spec = replay_->spec();
  promises_results_ = std::all_of(spec.results.begin(), spec.results.end(), [&](const auto& one) {
    return one.source == ResultSource::kInput ||
           (one.source == ResultSource::kOutput && !spec.outputs[one.index].operator_allocated);
  });
}

PythonReplay::Place PythonReplay::to_place(py::handle place) {
  const auto parts = py::reinterpret_borrow<py::tuple>(place);
  return Place{parts[0].cast<bool>(), py::reinterpret_borrow<py::object>(parts[1]),
               parts.size() > 2 ? std::optional(parts[2].cast<std::size_t>()) : std::nullopt};
}

void PythonReplay::set_deferred(int n_deferred, py::object await) {
  n_deferred_ = n_deferred;
  await_deferred_ = std::move(await);
}

void PythonReplay::await_deferred() const {
  if (n_deferred_ == 0) return;
  const py::object await = await_deferred_;
  await();
}

py::object PythonReplay::execute(const Arguments& arguments, CallGuard* guard) const {
  await_deferred();
  const BoundCall one = bound(arguments, guard);
  {
    const GilReleased release;
    one.replay->replay_->execute(one.call);
  }
  note_executed(one);
  return one.replay->result(*one.call);
}

BoundCall PythonReplay::bound(const Arguments& arguments, CallGuard* guard,
                              const Surroundings* asked) const {
  if (asked == nullptr) return bound_here(arguments, guard, nullptr);
  const c10::AutoGradMode grad_mode(asked->in_grad_mode);
  c10::OptionalStreamGuard torch_stream;  // on which torch allocates
  if (asked->torch_stream) torch_stream.reset_stream(*asked->torch_stream);
  return bound_here(arguments, guard, asked);
}

// After the check that the replay is open, no Python code runs.
BoundCall PythonReplay::bound_here(const Arguments& arguments, CallGuard* guard,
                                   const Surroundings* asked) const {
  const std::uint64_t begin_ns = now_ns();
  auto call = std::make_shared<Call>();
  call->call_ns = begin_ns;
  if (asked == nullptr) prepare(guard);
  const std::vector<std::int64_t> sizes = take_tensors(arguments, *call);
  bool is_due = false;
  if (sizes_) {
    if (auto found =
            promoted(found_promoted(sizes, arguments, asked, is_due), sizes, arguments, asked)) {
      found->call->call_ns = begin_ns;
      return *std::move(found);
    }
    take_instance(sizes, *call);
  }
  if (arguments.out() != nullptr) take_buffers(arguments.out(), call->given_results);
  if (arguments.feature_map() != nullptr) {
    python_.check_feature_map(py::handle(arguments.feature_map()));
    call->feature_map = to_tensor(arguments.feature_map());
  }
  if (replay_->closed()) throw ExecutionError("the executable is closed: load the program again");
  if (replay_->has_streams()) {
    bind_on_stream(*call, asked);
  } else if (asked != nullptr) {
    bind_call_in(*replay_, *call, *asked);
  } else {
    bind_call(replay_->spec(), *call);
  }
  if (is_due) {  // by a call that would be executed
    sizes_->promotions->ask(sizes, arguments.positional(), arguments.keyword());
    if (auto found = promoted(sizes_->promotions->found(sizes), sizes, arguments, asked)) {
      found->call->call_ns = begin_ns;
      return *std::move(found);
    }
    if (replay_->closed()) throw ExecutionError("the executable is closed: load the program again");
  }
  call->checked_ns = now_ns();
  return {py::object(), this, std::move(call)};
}

py::list PythonReplay::checked(const Arguments& arguments, const Surroundings& asked) const {
  const c10::AutoGradMode grad_mode(asked.in_grad_mode);
  Call call;
  take_tensors(arguments, call);
  if (replay_->closed()) throw ExecutionError("the executable is closed: load the program again");
  bind_call(replay_->spec(), call);
  check_devices(replay_->spec(), call);
  refuse_copies(call);
  replay_->check_ready(call);
  py::list tensors;
  for (at::Tensor& tensor : call.inputs) tensors.append(from_tensor(std::move(tensor)));
  return tensors;
}

void PythonReplay::refuse_copies(const Call& call) const {
  if (call.copies_in.empty()) return;
  const at::Tensor& given = call.copies_in.front().from;
  for (std::size_t index = 0; index < call.inputs.size(); ++index) {
    if (!call.inputs[index].is_same(given)) continue;
    const TensorLayout& layout = call.shapes->inputs[index];
    std::ostringstream message;
    message << replay_->spec().inputs[index].name << ": expected " << dtype_name(layout.dtype)
            << c10::IntArrayRef(layout.shape) << " with strides "
            << c10::IntArrayRef(layout.strides) << (layout.conjugate ? ", conjugated" : "")
            << (layout.negative ? ", negated" : "") << ", got strides " << given.strides()
            << (given.is_conj() ? ", conjugated" : "") << (given.is_neg() ? ", negated" : "")
            << ": launches on several devices take the recorded layout alone; pass such a copy";
    throw BindingError(message.str());
  }
}

Surroundings PythonReplay::surroundings(CallGuard* guard) const {
  prepare(guard);
  Surroundings now;
  now.in_grad_mode = c10::GradMode::is_enabled();
  now.n_threads = at::get_num_threads();
  if (replay_->has_streams()) take_stream(now);
  return now;
}

// The current stream of this thread.
void PythonReplay::take_stream(Surroundings& now) const {
  const c10::Device device = replay_->spec().device;
  const c10::OptionalDeviceGuard on_device(device.has_index() ? std::optional(device)
                                                              : std::nullopt);
  Call call;
  note_stream(call);
  now.drains_queue = call.drains_queue;
  now.stream = call.stream;
  now.torch_stream = call.torch_stream;
}

void PythonReplay::prepare(CallGuard* guard) const {
  check_caller();
  if (guard != nullptr && guard->look() != Found::kSame) keep_order(*guard);
}

// Refuses a call if torch's state differs from that of the recording.
void PythonReplay::check_caller() const {
  if (is_recording) {
    throw CaptureError(
        "a captured program was executed inside a call that is being recorded, where its "
        "launches cannot be seen: call the model itself there");
  }
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if (may_be_transformed(keys)) {
    if (const std::string what = active_transform(); !what.empty()) {
      throw BindingError("a captured program was called inside " + what +
                         ", which would see its result as a constant: call the model itself there");
    }
  }
  if (warns_of_gradients_ && c10::GradMode::is_enabled()) warn_of_gradients();
  if (!python_.caller) return;
  const RecordedCaller& recorded = *python_.caller;
  const c10::DeviceType device = replay_->spec().device.type();
  if (const std::uint64_t now = caller_state(device, keys); now != recorded.state) {
    throw BindingError(caller_state_change(recorded.state, now, device) +
                       ": the model would compute other values; call the program as it was "
                       "recorded, or capture it again as it is called");
  }
  if (recorded.root.is_none() || !is_in_other_mode(recorded.root, recorded.training)) return;
  throw BindingError(recorded.training
                         ? "the model was in training mode when it was recorded, and is in "
                           "evaluation mode now: call model.train(), or capture it again"
                         : "the model was in evaluation mode when it was recorded, and is in "
                           "training mode now: call model.eval(), or capture it again; beside "
                           "training steps in other threads capture a second module with the same "
                           "parameters");
}

// The memory written here may also be written by executions submitted before.
void PythonReplay::keep_order(CallGuard& guard) const {
  const auto wait = [this] {
    if (replay_->closed()) return;
    await_deferred();
    const GilReleased release;
    replay_->wait_for_submitted();
  };
  if (guard.look() == Found::kOther) {
    wait();
    guard.call();
  }
  if (guard.has_sums_to_clear()) wait();
  if (guard.lacks_gradients()) guard.give_gradients();
}

// Called at the first call in grad mode.
void PythonReplay::warn_of_gradients() const {
  warns_of_gradients_ = false;
  for (const WeightSpec& weight : replay_->spec().weights) {
    for (const at::Tensor& holder : weight.holders) {
      if (holder.requires_grad()) return static_cast<void>(python_.warn_of_gradients());
    }
  }
}

py::object PythonReplay::result(Call& call) const {
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
  if (form_ == ResultForm::kList) return items;
  if (call.instance) {
    return python_.build_result(std::move(items), py::tuple(py::cast(call.instance->sizes)));
  }
  return python_.build_result(std::move(items));
}

// Finds the tensors of a call; returns its sizes, where they vary.
std::vector<std::int64_t> PythonReplay::take_tensors(const Arguments& arguments, Call& call) const {
  Sizes sizes(sizes_ ? sizes_->n_dims : 0);
  if (!plain_ || !take_plain(arguments, call.inputs, sizes)) {
    const auto found = to_tensors(python_.match(arguments.positional(), arguments.keyword()));
    call.inputs.assign(found.begin(), found.end());
    std::fill(sizes.begin(), sizes.end(), std::nullopt);
  }
  return sizes_ ? sizes_of(arguments, std::move(sizes), call) : std::vector<std::int64_t>();
}

// The frequent case, without a Python frame: tensors and constants as recorded.
bool PythonReplay::take_plain(const Arguments& arguments, Tensors& tensors, Sizes& sizes) const {
  if (arguments.n_positional() != positional_.size() || arguments.n_keyword() != keyword_.size()) {
    return false;
  }
  tensors.reserve(replay_->spec().inputs.size());
  for (std::size_t index = 0; index < positional_.size(); ++index) {
    if (!positional_[index].take(arguments.positional(index), tensors, sizes)) {
      return tensors.clear(), false;
    }
  }
  for (const auto& [name, place] : keyword_) {
    PyObject* const given = arguments.keyword(name.ptr());
    if (given == nullptr || !place.take(given, tensors, sizes)) return tensors.clear(), false;
  }
  return true;
}

// Reads the sizes that no integer gave from the inputs. Returns whether all are known and agree.
bool PythonReplay::read_axes(const Tensors& tensors, Sizes& sizes) const {
  for (const auto& [dim, input, axis] : sizes_->axes) {
    const at::Tensor& tensor = tensors[input];
    if (static_cast<std::size_t>(tensor.dim()) <= axis) return false;
    const std::int64_t size = tensor.size(static_cast<std::int64_t>(axis));
    if (sizes[dim].value_or(size) != size) return false;
    sizes[dim] = size;
  }
  return std::all_of(sizes.begin(), sizes.end(), [](const auto& size) { return size.has_value(); });
}

std::vector<std::int64_t> PythonReplay::sizes_of(const Arguments& arguments, Sizes sizes,
                                                 const Call& call) const {
  if (!read_axes(call.inputs, sizes)) {
    return sizes_->find(arguments.positional(), arguments.keyword())
        .cast<std::vector<std::int64_t>>();
  }
  std::vector<std::int64_t> found;
  for (const auto& size : sizes) found.push_back(*size);
  return found;
}

void PythonReplay::take_instance(const std::vector<std::int64_t>& sizes, Call& call) const {
  call.sizes_found.was_ready = true;
  call.instance = sizes_->instances->ready(sizes);
  if (call.instance) return;
  const GilReleased release;
  call.instance = sizes_->instances->make(sizes, call.sizes_found);
}

void PythonReplay::take_buffers(PyObject* out, Tensors& buffers) const {
  if (take_plain(out, buffers)) return;
  const auto found = to_tensors(python_.match_buffers(py::handle(out)));
  buffers.assign(found.begin(), found.end());
}

// Takes buffers nested like a result that is a tensor, or a list or tuple of tensors.
bool PythonReplay::take_plain(PyObject* out, Tensors& buffers) const {
  if (form_ == ResultForm::kTensor) {
    if (!THPVariable_Check(out)) return false;
    buffers.push_back(THPVariable_Unpack(out));
    return true;
  }
  const std::size_t n_results = replay_->spec().results.size();
  if (form_ == ResultForm::kOther || !(PyList_CheckExact(out) || PyTuple_CheckExact(out)) ||
      static_cast<std::size_t>(PySequence_Fast_GET_SIZE(out)) != n_results) {
    return false;
  }
  buffers.resize(n_results);
  for (std::size_t index = 0; index < n_results; ++index) {
    PyObject* const one = PySequence_Fast_GET_ITEM(out, static_cast<Py_ssize_t>(index));
    if (one == Py_None) continue;
    if (!THPVariable_Check(one)) return buffers.clear(), false;
    buffers[index] = THPVariable_Unpack(one);
  }
  return true;
}

// Records the caller's current stream, as the driver's handle, and in torch's form for a lane's
// thread. (Tests have devices that torch takes for the CPU.)
void PythonReplay::note_stream(Call& call) const {
  const c10::Device device = replay_->spec().device;
  call.drains_queue = python_.drains_queue;
  if (!python_.current_stream.is_none()) {
    if (python_.drains_queue) call.drain.begin_ns = now_ns();
    call.stream =
        python_.current_stream(device.has_index() ? device.index() : 0).cast<std::uint64_t>();
    if (python_.drains_queue) call.drain.end_ns = now_ns();
  }
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl torch_device(device.type());
  call.torch_stream =
      torch_device.getStream(device.has_index() ? device : torch_device.getDevice());
  if (python_.current_stream.is_none() && replay_->needs_stream_handle()) {
    call.stream =
        reinterpret_cast<std::uint64_t>(torch_device.getStreamNativeHandle(*call.torch_stream));
  }
}

// Binds on the executable's device.
void PythonReplay::bind_on_stream(Call& call, const Surroundings* asked) const {
  const CallSpec& spec = replay_->spec();
  const c10::OptionalDeviceGuard guard(spec.device.has_index() ? std::optional(spec.device)
                                                               : std::nullopt);
  if (asked == nullptr) {
    bind_call(spec, call);
    check_devices(spec, call);
    note_stream(call);
  } else {
    bind_call_in(*replay_, call, *asked);
  }
  if (!python_.draw.is_none()) {
    replay_->check_ready(call);  // a draw cannot be undone
    call.random = python_.draw().cast<std::vector<std::uint64_t>>();
  }
}

}  // namespace offload
