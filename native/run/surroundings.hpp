// The state of a thread that submits, for a call that another thread binds later.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "run/call.hpp"

namespace offload {

class Replay;

// The state of the calling thread, kept for a call that another thread binds later.
struct Surroundings {
  bool in_grad_mode = true;
  int n_threads = 1;
  bool drains_queue = false;
  std::uint64_t stream = 0;
  std::optional<c10::Stream> torch_stream;
};

// Checks and binds a call of a replay whose tensors are known, as in the state that was taken.
//
// Thread: any; needs no GIL. Errors: as bind_call, and BindingError for a tensor on another device.
void bind_call_in(const Replay& replay, Call& call, const Surroundings& asked);

}  // namespace offload
