// What an execution waits for before it begins.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "offload/ticket.hpp"
#include "run/call.hpp"

namespace offload {

// Work that an execution depends on.
//
// Owner: the execution that waits. Work on the same device needs no host synchronisation: it must
// only have been enqueued, on the execution's own stream or on a torch stream, for which the
// execution's stream then waits by an event.
struct Dependency {
  std::shared_ptr<Ticket> ticket;
  bool is_on_device = false;
  std::optional<c10::Stream> stream;  // on the device, if not the execution's own
};

using Dependencies = std::vector<Dependency>;

// Waits on the thread that executes the call, just before it does. Throws DependencyError with the
// nested error if a dependency has failed, and CancelledError if one was cancelled.
void wait_for(const Dependencies& dependencies, const Call& call);

// Once the call has ended on the device: waits for dependencies there, and throws as wait_for.
void check_on_device(const Dependencies& dependencies);

// Throws as wait_for for work that has ended with this error; null: no-op.
void check_dependency(const std::exception_ptr& error);

}  // namespace offload
