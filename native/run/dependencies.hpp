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
// Owner: the execution that waits. Work on the same device is not waited for on the host: it need
// only have been enqueued, on the execution's own stream or on one of torch's, which the
// execution's then waits for by an event.
struct Dependency {
  std::shared_ptr<Ticket> ticket;
  bool is_on_device = false;
  std::optional<c10::Stream> stream;  // on the device, if not the execution's own
};

using Dependencies = std::vector<Dependency>;

// Waits on the thread that executes the call, just before it does. Throws DependencyError with the
// error nested if one has failed, and CancelledError if one was cancelled.
void wait_for(const Dependencies& dependencies, const Call& call);

// Waits for the ends of those on the device, once the call has ended there, and throws as wait_for.
void check_on_device(const Dependencies& dependencies);

// Throws as wait_for for work that has ended with this error; null: nothing.
void check_dependency(const std::exception_ptr& error);

}  // namespace offload
