// Calls by the executable of their sizes alone: see promotions.hpp.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "device/captured_stream.hpp"
#include "python_replay.hpp"

namespace py = pybind11;

namespace offload {

// The executable of a call's sizes alone, or none; `is_due`: these are due for one.
py::object PythonReplay::found_promoted(const std::vector<std::int64_t>& sizes,
                                        const Arguments& arguments, const Surroundings* asked,
                                        bool& is_due) const {
  Promotions* const promotions = sizes_->promotions.get();
  if (promotions == nullptr || replay_->closed() || replay_->is_tracing()) return {};
  // A call by which sizes are due is tried, with what its thread's state makes of it.
  if (asked != nullptr || !arguments.are_written()) return promotions->found(sizes);
  Promotions::Found found = promotions->find(sizes);
  if (found.is_due && found.executable) {
    promotions->ask(sizes, arguments.positional(), arguments.keyword());
    return promotions->found(sizes);
  }
  is_due = found.is_due;
  return found.executable;
}

// The call by `keep`, the executable of its sizes alone, if there is one and it can execute it
// here: it may need another feature map than the one that is given, or be a graph where the caller
// captures one; and a timeline is of one program.
std::optional<BoundCall> PythonReplay::promoted(py::object keep,
                                                const std::vector<std::int64_t>& sizes,
                                                const Arguments& arguments,
                                                const Surroundings* asked) const {
  if (!keep) return std::nullopt;
  const auto& replay = *keep.cast<const PythonReplay*>();
  PyObject* const given = arguments.feature_map();
  if ((given != nullptr && !replay.takes(given)) || replay.refuses_capturing()) return std::nullopt;
  std::optional<Surroundings> own;  // of the device's stream it may need to know more
  if (asked != nullptr && replay.replay_->has_streams()) replay.take_stream(own.emplace(*asked));
  BoundCall found = replay.bound_here(arguments, nullptr, own ? &*own : asked);
  found.call->sizes = sizes;
  found.keep = std::move(keep);
  return found;
}

// Of a tensor, whether it may be the feature map; other objects are refused by the called
// executable.
bool PythonReplay::takes(PyObject* feature_map) const {
  if (!THPVariable_Check(feature_map)) return false;
  if (THPVariable_Unpack(feature_map).nbytes() < replay_->spec().shapes.feature_map_bytes) {
    return false;
  }
  try {
    python_.check_feature_map(py::handle(feature_map));
  } catch (const py::error_already_set&) {
    return false;  // it lies where it was loaded, for good
  }
  return true;
}

// Whether the caller's current stream is being captured, into which a graph is not executed: as far
// as reported by torch.
bool PythonReplay::refuses_capturing() const {
  if (!replay_->has_streams() || !replay_->needs_stream_handle()) return false;
  const c10::Device device = replay_->spec().device;
  if (device.is_cpu()) return false;
  const c10::impl::VirtualGuardImpl torch_device(device.type());
  return is_being_captured(
      torch_device.getStream(device.has_index() ? device : torch_device.getDevice()));
}

void PythonReplay::note_executed(const BoundCall& bound) const {
  if (!sizes_ || !sizes_->promotions) return;
  const bool by_promoted = static_cast<bool>(bound.keep);
  sizes_->promotions->charge(by_promoted ? bound.call->sizes : bound.call->instance->sizes,
                             bound.call->execution_ns, by_promoted);
}

}  // namespace offload
