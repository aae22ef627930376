// torch's guards of devices, where torch was built for a device that the machine lacks.
#include <c10/core/impl/FakeGuardImpl.h>

#include "registers.hpp"

namespace offload {
namespace {

// The registry does not own guards. The guard that torch 2.11 puts there belongs to a thread, and
// may be destroyed by now: only its address is read.
bool keep_cuda_guard() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return false;
  using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
  static const auto* guard = new Guard;  // never destroyed, as torch asks of guards
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, guard);
  return true;
}

// The devices that the guard counts, or -1 without a guard.
int n_guarded_cuda_devices() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return -1;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

}  // namespace

void register_guards(pybind11::module_& module) {
  module.def("keep_cuda_guard", &keep_cuda_guard,
             "Replace torch's guard of CUDA devices by one that needs none and lasts as long as "
             "the process; whether torch has one. The machine must have no CUDA device.");
  module.def("n_guarded_cuda_devices", &n_guarded_cuda_devices,
             "How many CUDA devices torch's guard counts; -1: torch has no guard.");
}

}  // namespace offload
