#include "run/surroundings.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include "run/replay.hpp"

namespace offload {

void bind_call_in(const Replay& replay, Call& call, const Surroundings& asked) {
  const c10::AutoGradMode grad_mode(asked.in_grad_mode);
  c10::OptionalStreamGuard torch_stream;  // on which torch allocates
  if (asked.torch_stream) torch_stream.reset_stream(*asked.torch_stream);
  call.n_threads = asked.n_threads;
  const CallSpec& spec = replay.spec();
  if (!replay.has_streams()) return bind_call(spec, call);
  const c10::OptionalDeviceGuard guard(spec.device.has_index() ? std::optional(spec.device)
                                                               : std::nullopt);
  bind_call(spec, call);
  check_devices(spec, call);
  call.drains_queue = asked.drains_queue;
  call.stream = asked.stream;
  call.torch_stream = asked.torch_stream;
}

}  // namespace offload
