// Tensors on the host whose values a device's launches contain since their capture.
#pragma once

#include "run/call.hpp"

namespace offload {

// Refuses a call that would find another value than the recorded one: in an input that was recorded
// on the host, or in a tensor of the model there, which is read at its present place.
//
// Thread: any. Errors: BindingError naming the tensor, the recorded value and the present value.
void check_host_constants(const CallSpec& spec, const Call& call);

}  // namespace offload
