// Storages of a device of torch's own kind. Those of torch_npu record the format of their memory:
// that of shape and strides, or a format of the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace offload {

// Formats (aclFormat) in which memory is laid out by shape and strides: undefined, NCHW, NHWC, ND,
// NDHWC, NCDHW, NCL.
inline constexpr std::array<std::int64_t, 7> kPlainFormats = {-1, 0, 1, 2, 27, 30, 47};

// A storage on device memory, of the kind that torch makes there.
c10::Storage make_storage(c10::Device device, std::size_t n_bytes, c10::DataPtr memory);

// Records in the storage on which a tensor was made, unless it is recorded, that its memory has the
// tensor's layout. Thread: any.
void describe_storage(at::Tensor& tensor);

// Whether a tensor's memory has a format of the device (`npu_format_cast`) instead of the layout of
// its shape and strides. False on devices without such formats. Thread: any.
bool lies_in_own_format(const at::Tensor& tensor);

}  // namespace offload
