#include "run/dependencies.hpp"

#include <c10/core/Event.h>

#include <exception>

#include "device/captured_stream.hpp"
#include "offload/errors.hpp"

namespace offload {

// For a chain of failures the first error is nested, not an error for each link.
void check_dependency(const std::exception_ptr& error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const DependencyError&) {
    throw;
  } catch (const CancelledError&) {
    throw CancelledError("a dependency was cancelled before it began");
  } catch (...) {
    std::throw_with_nested(DependencyError(
        "it did not begin, since a dependency failed, which is the cause of this error"));
  }
}

void wait_for(const Dependencies& dependencies, const Call& call) {
  for (const Dependency& one : dependencies) {
    if (!one.is_on_device) {
      one.ticket->await_end();
    } else {
      one.ticket->await_issue();
    }
    check_dependency(one.ticket->error());
    if (!one.stream || one.ticket->done()) continue;
    if (is_being_captured(*call.torch_stream)) {
      throw ExecutionError(
          "the current stream is being captured, and the execution depends on a ticket of work "
          "outside the capture: wait for the ticket before the capture begins");
    }
    // The event follows what the stream has by now: the awaited work and possibly more.
    c10::Event event(one.stream->device_type());
    event.record(*one.stream);
    event.block(*call.torch_stream);
    // Torch may deliver the wait later, from a queue that the execution does not use.
    if (call.drains_queue) call.torch_stream->native_handle();
  }
}

void check_on_device(const Dependencies& dependencies) {
  for (const Dependency& one : dependencies) {
    if (!one.is_on_device) continue;
    one.ticket->await_end();
    check_dependency(one.ticket->error());
  }
}

}  // namespace offload
