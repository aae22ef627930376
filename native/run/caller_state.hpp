// The state of torch around a call that decides what the model computes, apart from its arguments.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <string>

namespace offload {

// Autocast of the CPU and of a device (whether it is on, and its dtype), and the default dtype, of
// this thread now, in one word. `now`: the thread's own.
std::uint64_t caller_state(c10::DeviceType device, const c10::impl::LocalDispatchKeySet& now);

// Which of them differ, in words: "autocast on cpu: off when it was recorded, bfloat16 now".
// `recorded`, `now`: words of the same device that differ.
std::string caller_state_change(std::uint64_t recorded, std::uint64_t now, c10::DeviceType device);

// Whatever transforms or traces calls is also in this set, and few other things are. `now`: the
// thread's own.
inline bool may_be_transformed(const c10::impl::LocalDispatchKeySet& now) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet keys({DispatchKey::Python, DispatchKey::PreDispatch,
                                      DispatchKey::Tracer, DispatchKey::Functionalize,
                                      DispatchKey::FuncTorchDynamicLayerFrontMode});
  return now.included_.has_any(keys);
}

// What transforms or traces the calls of this thread, for people; empty where nothing does. The
// user's own dispatch modes, which see an execution as a profiler does, are nothing of the kind.
std::string active_transform();

}  // namespace offload
