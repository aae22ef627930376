// Storages of a device of torch's own kind. torch_npu's know in which format their memory lies: as
// shape and strides say, or in one of the device's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace offload {

// Formats in which memory is as shape and strides say, by their numbers (aclFormat): undefined,
// NCHW, NHWC, ND, NDHWC, NCDHW, NCL.
inline constexpr std::array<std::int64_t, 7> kPlainFormats = {-1, 0, 1, 2, 27, 30, 47};

// A storage on memory of a device, of the kind that torch makes there.
c10::Storage make_storage(c10::Device device, std::size_t n_bytes, c10::DataPtr memory);

// Lets the storage that a tensor was made on know, where it does not yet, that its memory is as the
// tensor says. Thread: any.
void describe_storage(at::Tensor& tensor);

// Whether the memory of a tensor is laid out otherwise than shape and strides say, in a format of
// the device's own (`npu_format_cast`). False on devices that have none. Thread: any.
bool lies_in_own_format(const at::Tensor& tensor);

}  // namespace offload
