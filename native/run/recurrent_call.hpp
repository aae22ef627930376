// How recurrent layers are called, which are composites that are launched whole.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

namespace offload {

// Calls an operator below autograd. A recurrent layer (the overload `input` of aten::gru and its
// like) chooses kernels by whether a view of its weights requires gradients (should_fold of
// aten/src/ATen/native/LinearAlgebra.cpp), as eager does without recording any: views know that
// where they are followed. Thread: the calling one, in a KernelScope. Errors: the operator's.
inline void call_operator(const c10::OperatorHandle& call, const std::string& overload,
                          std::vector<c10::IValue>& stack) {
  if (overload != "input") {
    call.callBoxed(&stack);
    return;
  }
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard guard(
      keys.included_, keys.excluded_.remove(c10::DispatchKey::ADInplaceOrView));
  call.callBoxed(&stack);
}

}  // namespace offload
