#include "run/kernel_scope.hpp"

namespace offload {
namespace {

c10::DispatchKeySet above_kernels() {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  return c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
         c10::python_ks |
         DispatchKeySet({DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize,
                         DispatchKey::FuncTorchDynamicLayerFrontMode,
                         DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
                         DispatchKey::FuncTorchGradWrapper});
}

}  // namespace

KernelScope::KernelScope()
    : autograd_(c10::AutogradState::get_tls_state()),
      keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), above_kernels()) {
  c10::AutogradState::set_tls_state(c10::AutogradState(
      /*grad_mode=*/false, /*inference_mode=*/false, /*fw_grad_mode=*/false,
      /*multithreading_enabled=*/false));
}

}  // namespace offload
