#include "run/call.hpp"

#include <ATen/ops/copy.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "offload/dtype_name.hpp"
#include "offload/errors.hpp"
#include "run/device_storages.hpp"
#include "run/host_constants.hpp"
#include "run/instances.hpp"
#include "run/kernel_scope.hpp"
#include "run/overlaps.hpp"

namespace offload {
namespace {

std::string text(const TensorLayout& layout) {
  std::ostringstream out;
  out << dtype_name(layout.dtype) << c10::IntArrayRef(layout.shape);
  return out.str();
}

std::string text(const at::Tensor& tensor) {
  std::ostringstream out;
  out << dtype_name(tensor.scalar_type()) << tensor.sizes();
  return out.str();
}

[[noreturn]] void refuse(const std::string& message) { throw BindingError(message); }

// Bytes from the first element to one past the last.
std::size_t span(c10::IntArrayRef shape, c10::IntArrayRef strides, std::size_t item_bytes) {
  std::int64_t last = 0;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] == 0) return 0;
    last += (shape[dim] - 1) * strides[dim];
  }
  return static_cast<std::size_t>(last + 1) * item_bytes;
}

// Whether forward-mode differentiation gave the tensor a tangent.
bool has_tangent(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor._fw_grad(0).defined();
}

// Whether autograd would see a write: to a tensor that requires gradients, or to a view of such a
// tensor. In grad mode only: without it, a write is the caller's responsibility, as in eager mode.
bool is_in_graph(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() &&
         (tensor.requires_grad() || (tensor.is_view() && tensor._base().requires_grad()));
}

// Whether a tensor is a strided view of its own memory, with standard behaviour.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  constexpr c10::DispatchKeySet wrapped(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Functionalize, c10::DispatchKey::NestedTensor});
  return tensor.layout() == c10::kStrided && !impl->is_python_dispatch() && impl->has_storage() &&
         !tensor._is_zerotensor() && !impl->key_set().has_any(wrapped) && !has_tangent(tensor);
}

// A name of an input, or the position of a given buffer, which is named when it is refused.
std::string text(const std::string& name) { return name; }
std::string text(std::size_t given) { return given_name(given); }

template <typename Name>
void check_plain(const at::Tensor& tensor, const Name& name) {
  if (is_plain(tensor)) return;
  refuse(text(name) + ": expected a plain strided tensor, got a sparse, nested or zero tensor, a " +
         "subclass, or one inside a functional transform or with a tangent");
}

template <typename Name>
void check_has_memory(const at::Tensor& tensor, const Name& name) {
  const std::size_t begin =
      static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  if (tensor.numel() > 0 && begin + span_bytes_of(tensor) > tensor.storage().nbytes()) {
    refuse(text(name) + ": the tensor's memory was freed or shrunk (its storage has " +
           std::to_string(tensor.storage().nbytes()) + " bytes); give it memory again");
  }
  if (tensor.numel() > 0 && tensor.storage().data() == nullptr) {
    refuse(text(name) + ": the tensor has no memory");
  }
}

template <typename Name>
void check_tensor(const at::Tensor& tensor, const TensorLayout& layout, const Name& name,
                  c10::Device device, bool sizes_vary) {
  if (!tensor.defined()) refuse(text(name) + ": expected " + text(layout) + ", got no tensor");
  check_plain(tensor, name);
  if (tensor.device().type() != device.type()) {
    refuse(text(name) + ": expected a tensor on " + device.str() + ", got one on " +
           tensor.device().str() + "; move it with .to(\"" + device.str() + "\")");
  }
  if (tensor.scalar_type() != layout.dtype || tensor.sizes() != c10::IntArrayRef(layout.shape)) {
    refuse(text(name) + ": expected " + text(layout) + ", got " + text(tensor) +
           (sizes_vary ? "; only the sizes that were captured as Dims vary, and these follow from "
                         "the call's arguments"
                       : "; this executable takes one shape and dtype: capture again for another, "
                         "or call what was captured itself. Sizes of what is neither a training "
                         "step nor has collectives may vary, by dynamic_shapes= and "
                         "load(sizes=Sizes())"));
  }
  check_has_memory(tensor, name);
  if (lies_in_own_format(tensor)) {
    refuse(text(name) +
           ": expected plain memory, got a tensor in a format of the device; cast it " +
           "with torch_npu.npu_format_cast(tensor, 2)");
  }
}

// Whether several elements of a tensor may share an address, as after expand. In order of strides,
// each dimension must step over all that the dimensions with smaller strides reach.
bool repeats_elements(c10::IntArrayRef shape, c10::IntArrayRef strides) {
  std::vector<std::pair<std::int64_t, std::int64_t>> steps;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] == 0) return false;
    if (shape[dim] > 1) steps.emplace_back(strides[dim], shape[dim]);
  }
  std::sort(steps.begin(), steps.end());
  std::int64_t reached = 0;
  for (const auto& [stride, size] : steps) {
    if (stride <= reached) return true;
    reached += stride * (size - 1);
  }
  return false;
}

bool usable_in_place(const at::Tensor& tensor, const TensorLayout& layout) {
  return tensor.is_conj() == layout.conjugate && tensor.is_neg() == layout.negative &&
         same_strides(tensor, layout);
}

at::Tensor fresh(const TensorLayout& layout, c10::Device device) {
  const std::size_t n_bytes = layout.span_bytes();
  c10::DataPtr memory = c10::GetAllocator(device.type())->allocate(n_bytes);
  return tensor_on(make_storage(device, n_bytes, std::move(memory)), 0, layout, device);
}

bool is_aligned(const at::Tensor& tensor, std::size_t alignment_bytes) {
  return alignment_bytes <= 1 ||
         reinterpret_cast<std::uint64_t>(tensor.const_data_ptr()) % alignment_bytes == 0;
}

// Explains why a tensor that cannot be used in place cannot be copied either.
void refuse_copy(const InputSpec& input, const TensorLayout& layout, const at::Tensor& given,
                 bool as_recorded) {
  std::ostringstream message;
  if (repeats_elements(layout.shape, layout.strides)) {
    message << input.name << ": recorded with strides " << c10::IntArrayRef(layout.strides)
            << ", by which elements share memory (expand, unfold), got " << given.strides();
    if (as_recorded) {
      message << " at an address that is not a multiple of " << input.alignment_bytes << " bytes";
    }
    message << "; pass one with these strides" << (as_recorded ? " and a multiple of them" : "")
            << ", or capture with a .contiguous() one";
    refuse(message.str());
  }
  if (input.returned_as_view && !as_recorded) {
    message << input.name << ": the result is a view of it, so it needs the recorded strides "
            << c10::IntArrayRef(layout.strides) << ", got " << given.strides();
    refuse(message.str());
  }
}

c10::Device device_of(const CallSpec& spec, const InputSpec& input) {
  return input.on_host ? c10::Device(c10::kCPU) : spec.device;
}

// An execution records no gradients, while the model would.
void check_gradients(const InputSpec& input, const at::Tensor& given) {
  if (given.requires_grad()) {
    refuse(input.name +
           ": it requires gradients, and an execution records none; call under "
           "torch.no_grad(), or pass its .detach()");
  }
  if (input.written && is_in_graph(given)) {
    refuse(input.name +
           ": it is written, and a view of a tensor that requires gradients; call under "
           "torch.no_grad(), or pass its .detach()");
  }
}

void bind_input(const CallSpec& spec, std::size_t index, bool in_grad_mode, Call& call) {
  const InputSpec& input = spec.inputs[index];
  const TensorLayout& layout = call.shapes->inputs[index];
  const at::Tensor& given = call.inputs[index];
  check_tensor(given, layout, input.name, device_of(spec, input), call.instance != nullptr);
  if (in_grad_mode) check_gradients(input, given);
  if (input.written && repeats_elements(given.sizes(), given.strides())) {
    refuse(input.name + ": it is written, but several of its elements share memory; pass a " +
           ".clone() of it");
  }
  const bool as_recorded = usable_in_place(given, layout);
  if (as_recorded &&
      (input.takes_any_address() || (!input.copied && is_aligned(given, input.alignment_bytes)))) {
    call.bound_inputs.push_back(given);
    return;
  }
  refuse_copy(input, layout, given, as_recorded);
  at::Tensor copy = input.copied ? input.buffer : fresh(layout, spec.device);
  call.copies_in.push_back({given, copy});
  call.bytes_copied += given.nbytes();
  const bool takes_writes = !repeats_elements(given.sizes(), given.strides());
  if (input.written || (input.may_be_written && takes_writes)) {
    call.copies_back.push_back({copy, given});
    call.bytes_copied += given.nbytes();
  }
  call.bound_inputs.push_back(std::move(copy));
}

void check_given(const CallSpec& spec, Call& call, std::size_t index) {
  const at::Tensor& given = call.given_results[index];
  if (!given.defined()) return;
  const ResultSpec& result = spec.results[index];
  if (result.source != ResultSource::kOutput) {
    const bool of_input = result.source == ResultSource::kInput;
    refuse(given_name(index) + ": the result is " +
           (of_input ? spec.inputs[result.index].name : spec.weights[result.index].name) +
           " itself or a view of it, so it takes no buffer; pass None");
  }
  check_tensor(given, call.shapes->results[index].layout, index, spec.device,
               call.instance != nullptr);
  if (given.requires_grad() || is_in_graph(given)) {
    refuse(given_name(index) +
           ": an execution records no gradients, but the buffer requires them; pass a " +
           "buffer made by torch.empty, or its .detach()");
  }
  if (repeats_elements(given.sizes(), given.strides())) {
    refuse(given_name(index) +
           ": several of its elements share memory; pass a buffer without expanded " +
           "dimensions");
  }
}

c10::Storage storage_of(c10::Device device, std::size_t n_bytes, const std::string& what) {
  return make_storage(device, n_bytes, allocate(device, n_bytes, what));
}

TensorLayout bytes_layout(std::size_t n_bytes) {
  return {{static_cast<std::int64_t>(n_bytes)}, {1}, c10::ScalarType::Byte};
}

void bind_outputs(const CallSpec& spec, Call& call) {
  call.outputs.resize(spec.outputs.size());
  call.output_addresses.assign(spec.outputs.size(), 0);
  for (std::size_t index = 0; index < spec.results.size(); ++index) {
    check_given(spec, call, index);
    const at::Tensor& given = call.given_results[index];
    const ResultSpec& result = spec.results[index];
    if (!given.defined()) continue;
    const ResultShape& shape = call.shapes->results[index];
    const OutputSpec& output = spec.outputs[result.index];
    if (shape.covers_output && output.copied) {
      // Nothing else needs the output's memory, so one copy suffices for any strides.
      call.outputs[result.index] = output.buffer.storage();
      call.copies_out.push_back(
          {tensor_on(output.buffer.storage(), shape.offset_bytes, shape.layout, spec.device),
           given});
      call.bytes_copied += given.nbytes();
      continue;
    }
    const bool in_place = shape.covers_output && !output.operator_allocated && !output.copied &&
                          usable_in_place(given, shape.layout) &&
                          is_aligned(given, output.alignment_bytes);
    if (in_place) {
      call.outputs[result.index] = given.storage();
      call.output_addresses[result.index] =
          reinterpret_cast<std::uint64_t>(given.mutable_data_ptr());
    } else {
      call.copied_results.push_back(index);
      call.bytes_copied += given.nbytes();
    }
  }
  for (std::size_t index = 0; index < spec.outputs.size(); ++index) {
    const OutputSpec& output = spec.outputs[index];
    if (output.copied) {
      call.output_addresses[index] =
          reinterpret_cast<std::uint64_t>(output.buffer.const_data_ptr());
    }
    if (output.operator_allocated || call.outputs[index]) continue;
    const std::size_t size_bytes = call.shapes->outputs_bytes[index];
    c10::Storage storage = storage_of(spec.device, size_bytes, output.name);
    if (output.copied) {
      const TensorLayout bytes = bytes_layout(size_bytes);
      call.copies_out.push_back({output.buffer, tensor_on(storage, 0, bytes, spec.device)});
      call.bytes_copied += size_bytes;
    } else {
      call.output_addresses[index] = reinterpret_cast<std::uint64_t>(storage.mutable_data());
    }
    call.outputs[index] = std::move(storage);
    ++call.outputs_allocated;
  }
}

void check_feature_map(const CallSpec& spec, const Call& call) {
  const at::Tensor& map = call.feature_map;
  if (!map.defined()) return;
  const std::string name = "feature_map";
  check_plain(map, name);
  if (map.scalar_type() != c10::ScalarType::Byte || !map.is_contiguous() ||
      map.device().type() != spec.device.type()) {
    refuse("feature_map: expected a contiguous uint8 tensor on " + spec.device.str() + ", got " +
           text(map) + " on " + map.device().str());
  }
  const std::size_t needed_bytes = call.shapes->feature_map_bytes;
  if (map.nbytes() < needed_bytes) {
    refuse("feature_map: expected at least " + std::to_string(needed_bytes) + " bytes, got " +
           std::to_string(map.nbytes()) +
           (call.instance
                ? "; allocate run.feature_map_bytes_at(sizes) of them, for the greatest sizes"
                : "; allocate run.feature_map_bytes of them"));
  }
  check_has_memory(map, name);
  if (!is_aligned(map, spec.alignment_bytes) && needed_bytes > 0) {
    refuse("feature_map: expected an address aligned to " + std::to_string(spec.alignment_bytes) +
           " bytes; torch.empty gives one, a slice may not");
  }
  check_feature_map_overlaps(spec, call);
}

}  // namespace

void check_devices(const CallSpec& spec, const Call& call) {
  if (!spec.device.has_index()) return;
  const auto check = [&](const at::Tensor& tensor, const std::string& name) {
    if (!tensor.defined() || tensor.device() == spec.device) return;
    refuse(name + ": expected a tensor on " + spec.device.str() + ", got one on " +
           tensor.device().str() + "; move it with .to(\"" + spec.device.str() + "\")");
  };
  for (std::size_t index = 0; index < call.inputs.size(); ++index) {
    if (!spec.inputs[index].on_host) check(call.inputs[index], spec.inputs[index].name);
  }
  for (std::size_t index = 0; index < call.given_results.size(); ++index) {
    check(call.given_results[index], given_name(index));
  }
  check(call.feature_map, "feature_map");
}

void make_buffers(CallSpec& spec) {
  const c10::OptionalDeviceGuard guard(spec.device.has_index() ? std::optional(spec.device)
                                                               : std::nullopt);
  for (std::size_t index = 0; index < spec.inputs.size(); ++index) {
    InputSpec& input = spec.inputs[index];
    if (!input.copied) continue;
    const TensorLayout& layout = spec.shapes.inputs[index];
    input.buffer =
        tensor_on(storage_of(spec.device, layout.span_bytes(), input.name), 0, layout, spec.device);
  }
  for (std::size_t index = 0; index < spec.outputs.size(); ++index) {
    OutputSpec& output = spec.outputs[index];
    if (!output.copied) continue;
    const std::size_t size_bytes = spec.shapes.outputs_bytes[index];
    output.buffer = tensor_on(storage_of(spec.device, size_bytes, output.name), 0,
                              bytes_layout(size_bytes), spec.device);
  }
}

void release_buffers(CallSpec& spec) noexcept {
  for (InputSpec& input : spec.inputs) input.buffer.reset();
  for (OutputSpec& output : spec.outputs) output.buffer.reset();
}

c10::DataPtr allocate(c10::Device device, std::size_t n_bytes, const std::string& what) {
  try {
    return c10::GetAllocator(device.type())->allocate(n_bytes);
  } catch (const std::exception&) {
    throw OutOfMemory("out of memory: " + std::to_string(n_bytes) + " bytes for " + what +
                      " cannot be allocated on " + device.str());
  }
}

void check_memory(const std::string& name, const at::Tensor& tensor) {
  check_plain(tensor, name);
  check_has_memory(tensor, name);
}

std::size_t span_bytes_of(const at::Tensor& tensor) {
  return span(tensor.sizes(), tensor.strides(), tensor.element_size());
}

bool same_strides(const at::Tensor& tensor, const TensorLayout& layout) {
  if (tensor.numel() == 0) return true;
  const auto strides = tensor.strides();
  for (std::size_t dim = 0; dim < layout.shape.size(); ++dim) {
    if (strides[dim] != layout.strides[dim] && layout.shape[dim] > 1) return false;
  }
  return true;
}

std::size_t TensorLayout::span_bytes() const {
  return span(shape, strides, c10::elementSize(dtype));
}

at::Tensor tensor_on_described(c10::Storage storage, std::int64_t offset_bytes,
                               const TensorLayout& layout, c10::Device device) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(layout.dtype, c10::Layout::Strided, device));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, c10::scalarTypeToTypeMeta(layout.dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(
      layout.shape, layout.strides,
      offset_bytes / static_cast<std::int64_t>(c10::elementSize(layout.dtype)));
  if (layout.conjugate) impl->_set_conj(true);
  if (layout.negative) impl->_set_neg(true);
  return tensor;
}

at::Tensor tensor_on(c10::Storage storage, std::int64_t offset_bytes, const TensorLayout& layout,
                     c10::Device device) {
  at::Tensor tensor = tensor_on_described(std::move(storage), offset_bytes, layout, device);
  describe_storage(tensor);
  return tensor;
}

void bind_call(const CallSpec& spec, Call& call) {
  call.shapes = call.instance ? &call.instance->shapes : &spec.shapes;
  if (call.inputs.size() != spec.inputs.size()) {
    refuse("expected " + std::to_string(spec.inputs.size()) + " tensors, got " +
           std::to_string(call.inputs.size()));
  }
  const bool has_out = !call.given_results.empty();
  if (has_out && call.given_results.size() != spec.results.size()) {
    refuse("out: expected " + std::to_string(spec.results.size()) + " buffers or None, got " +
           std::to_string(call.given_results.size()));
  }
  call.bound_inputs.reserve(call.inputs.size());
  call.given_results.resize(spec.results.size());
  const bool in_grad_mode = c10::GradMode::is_enabled();
  for (std::size_t index = 0; index < spec.inputs.size(); ++index) {
    bind_input(spec, index, in_grad_mode, call);
  }
  if (!spec.host_constants.empty()) check_host_constants(spec, call);
  check_input_overlaps(spec, call);
  bind_outputs(spec, call);
  if (has_out) check_given_overlaps(spec, call);
  check_feature_map(spec, call);
}

Tensors results_of(const CallSpec& spec, Call& call) {
  // The caller may be in inference mode; results made here are normal tensors.
  std::optional<KernelScope> scope;
  const auto make = [&](const c10::Storage& storage, std::int64_t offset_bytes,
                        const ResultSpec& result, const TensorLayout& layout) {
    if (result.source != ResultSource::kOutput &&
        static_cast<std::size_t>(offset_bytes) + layout.span_bytes() > storage.nbytes()) {
      refuse("the result is a view of " +
             (result.source == ResultSource::kInput ? spec.inputs[result.index].name
                                                    : spec.weights[result.index].name) +
             ", whose memory was freed or shrunk since the execution; take the result before");
    }
    if (!scope) scope.emplace();
    return tensor_on(storage, offset_bytes, layout, spec.device);
  };
  Tensors results;
  results.reserve(spec.results.size());
  for (std::size_t index = 0; index < spec.results.size(); ++index) {
    const ResultSpec& result = spec.results[index];
    const auto& [offset_bytes, layout, _] = call.shapes->results[index];
    const at::Tensor& given = call.given_results[index];
    if (result.source == ResultSource::kInput) {
      const at::Tensor& input = call.inputs[result.index];
      const at::Tensor& callers_input = call.callers ? call.callers->inputs[result.index] : input;
      const auto base = static_cast<std::int64_t>(input.storage_offset() *
                                                  static_cast<std::int64_t>(input.element_size()));
      results.push_back(result.is_argument
                            ? callers_input
                            : make(input.storage(), base + offset_bytes, result, layout));
    } else if (result.source == ResultSource::kWeight) {
      results.push_back(make(call.weights[index], offset_bytes, result, layout));
    } else if (given.defined()) {
      results.push_back(call.callers ? call.callers->given_results[index] : given);
    } else {
      results.push_back(make(call.outputs[result.index], offset_bytes, result, layout));
    }
  }
  return results;
}

}  // namespace offload
