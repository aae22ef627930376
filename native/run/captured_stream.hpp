// Whether a stream is being captured, as far as torch tells.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace offload {

template <typename TorchDevice>
auto asked_of(const TorchDevice& torch_device, const c10::Stream& stream, int)
    -> decltype(torch_device.isStreamCapturing(stream)) {
  return torch_device.isStreamCapturing(stream);
}

// Torch before 2.13 does not tell.
template <typename TorchDevice>
bool asked_of(const TorchDevice&, const c10::Stream&, long) {
  return false;
}

// Of any device of torch's. Its own guard answers; false where that does not know captures, as
// torch_npu's may not.
inline bool is_being_captured(const c10::Stream& stream) {
  return asked_of(c10::impl::VirtualGuardImpl(stream.device_type()), stream, 0);
}

}  // namespace offload
