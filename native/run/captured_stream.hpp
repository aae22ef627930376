// Whether a stream is being captured, as far as torch tells.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace offload {

template <typename TorchDevice>
bool is_being_captured(const TorchDevice& torch_device, const c10::Stream& stream) {
  if constexpr (requires { torch_device.isStreamCapturing(stream); }) {
    return torch_device.isStreamCapturing(stream);
  }
  return false;  // torch before 2.13 does not tell
}

// Of any device of torch's. Its own guard answers; false where that does not know captures, as
// torch_npu's may not.
inline bool is_being_captured(const c10::Stream& stream) {
  return is_being_captured(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

}  // namespace offload
