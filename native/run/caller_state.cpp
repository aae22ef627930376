#include "run/caller_state.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "offload/dtype_name.hpp"

namespace offload {
namespace {

// A dtype, and a bit for its presence.
constexpr unsigned kFieldBits = 9;
constexpr std::uint64_t kPresent = 1U << (kFieldBits - 1);
constexpr std::uint64_t kField = (1U << kFieldBits) - 1;
constexpr unsigned kHostAutocast = 0;
constexpr unsigned kDeviceAutocast = kFieldBits;
constexpr unsigned kDefaultDtype = 2 * kFieldBits;

std::uint64_t field(c10::ScalarType dtype) {
  return kPresent | static_cast<std::uint64_t>(static_cast<std::uint8_t>(dtype));
}

// Like at::autocast::is_autocast_enabled, which looks up the thread's keys at each call.
std::uint64_t autocast_field(c10::DeviceType device, const c10::impl::LocalDispatchKeySet& now) {
  const bool is_off =
      now.excluded_.has(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return is_off ? 0 : field(at::autocast::get_autocast_dtype(device));
}

std::string text(std::uint64_t field) {
  return (field & kPresent) == 0 ? "off" : dtype_name(static_cast<c10::ScalarType>(field & 0xFF));
}

bool is_mode_active(c10::impl::TorchDispatchModeKey key) {
  return c10::impl::TorchDispatchModeTLS::get_mode(key).has_value();
}

}  // namespace

std::uint64_t caller_state(c10::DeviceType device, const c10::impl::LocalDispatchKeySet& now) {
  std::uint64_t word = autocast_field(c10::kCPU, now) << kHostAutocast;
  if (device != c10::kCPU && at::autocast::is_autocast_available(device)) {
    word |= autocast_field(device, now) << kDeviceAutocast;
  }
  return word | field(c10::get_default_dtype_as_scalartype()) << kDefaultDtype;
}

std::string caller_state_change(std::uint64_t recorded, std::uint64_t now, c10::DeviceType device) {
  const auto change = [&](unsigned begin, const std::string& name) -> std::string {
    const std::uint64_t was = recorded >> begin & kField;
    const std::uint64_t is = now >> begin & kField;
    if (was == is) return "";
    return name + ": " + text(was) + " when it was recorded, " + text(is) + " now";
  };
  std::string all;
  for (const std::string& one :
       {change(kHostAutocast, "autocast on cpu"),
        change(kDeviceAutocast, "autocast on " + c10::DeviceTypeName(device, /*lower_case=*/true)),
        change(kDefaultDtype, "the default dtype")}) {
    if (!one.empty()) all += (all.empty() ? "" : "; ") + one;
  }
  return all;
}

std::string active_transform() {
  using c10::DispatchKey;
  using Mode = c10::impl::TorchDispatchModeKey;
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has(DispatchKey::Tracer)) return "torch.jit.trace";
  if (included.has(DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return "a transform of torch.func (vmap, grad, vjp, jvp, functionalize)";
  }
  if (included.has(DispatchKey::PreDispatch) || is_mode_active(Mode::PROXY)) {
    return "make_fx or torch.export";
  }
  if (is_mode_active(Mode::FAKE)) return "a FakeTensorMode";
  if (included.has(DispatchKey::Functionalize) || is_mode_active(Mode::FUNCTIONAL)) {
    return "functionalization";
  }
  return "";
}

}  // namespace offload
