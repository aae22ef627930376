// State of torch around a call that affects the model's results, apart from its arguments.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <string>

namespace offload {

// Autocast of the CPU and of a device (whether it is on, and its dtype), and the default dtype, of
// this thread now, in one word. `now`: the thread's dispatch keys.
std::uint64_t caller_state(c10::DeviceType device, const c10::impl::LocalDispatchKeySet& now);

// The differences in words: "autocast on cpu: off when it was recorded, bfloat16 now". `recorded`,
// `now`: differing words of the same device.
std::string caller_state_change(std::uint64_t recorded, std::uint64_t now, c10::DeviceType device);

// Quick test: everything that transforms or traces calls is in this set, and little else. `now`:
// the thread's dispatch keys.
inline bool may_be_transformed(const c10::impl::LocalDispatchKeySet& now) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet keys({DispatchKey::Python, DispatchKey::PreDispatch,
                                      DispatchKey::Tracer, DispatchKey::Functionalize,
                                      DispatchKey::FuncTorchDynamicLayerFrontMode});
  return now.included_.has_any(keys);
}

// A description of what transforms or traces the calls of this thread; empty if nothing does. The
// user's own dispatch modes do not count: they see an execution as a profiler does.
std::string active_transform();

}  // namespace offload
