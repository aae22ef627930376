#include "run/device_storages.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/set_ops.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <optional>

namespace offload {
namespace {

// torch_npu's keys; straight to the device's kernel, regardless of the caller's modes.
constexpr c10::DispatchKeySet kKernels(c10::DispatchKey::PrivateUse1);

using FormatOf = c10::TypedOperatorHandle<std::int64_t(const at::Tensor&)>;

// No value if torch_npu is not loaded: the device is another's.
const std::optional<FormatOf>& format_of() {
  static const std::optional<FormatOf> found = [] {
    const auto known = c10::Dispatcher::singleton().findSchema({"npu::get_npu_format", ""});
    return known ? std::optional(known->typed<std::int64_t(const at::Tensor&)>()) : std::nullopt;
  }();
  return found;
}

bool knows_format(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1 && format_of();
}

}  // namespace

c10::Storage make_storage(c10::Device device, std::size_t n_bytes, c10::DataPtr memory) {
  return c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), n_bytes, std::move(memory),
                                c10::GetAllocator(device.type()), /*resizable=*/true, device);
}

void describe_storage(at::Tensor& tensor) {
  if (!knows_format(tensor)) return;
  at::_ops::set__source_Storage_storage_offset::redispatch(
      kKernels, tensor, tensor.storage(), tensor.sym_storage_offset(), tensor.sym_sizes(),
      tensor.sym_strides());
}

bool lies_in_own_format(const at::Tensor& tensor) {
  if (!knows_format(tensor)) return false;
  const std::int64_t format = format_of()->redispatch(kKernels, tensor);
  return std::find(kPlainFormats.begin(), kPlainFormats.end(), format) == kPlainFormats.end();
}

}  // namespace offload
