// The thread-local state under which launches run, independent of the caller's.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace offload {

// While it lives, operators called on this thread go straight to the device's kernels: no autograd,
// autocast, dispatch modes or inference mode; new tensors are normal ones.
//
// Owner: a stack frame. Thread: the one that made it.
class KernelScope {
 public:
  KernelScope();
  ~KernelScope() { c10::AutogradState::set_tls_state(autograd_); }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  c10::AutogradState autograd_;
  c10::impl::ForceDispatchKeyGuard keys_;
};

}  // namespace offload
