// Turns: what executables share that execute one at a time.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <optional>

#include "offload/lane.hpp"

namespace offload {

class Replay;

// The order of executions, and the memory that activations of one after the other lie in.
//
// Owner: shared by its replays; each has its own until it joins another's. Thread: members besides
// the lane change only under the lane's execution mutex.
struct Turn {
  bool running = false;  // one of its replays is executing
  c10::DataPtr arena;    // if the device has no arena
  std::size_t arena_bytes = 0;

  // Of replays that keep their order on the device: which of them executed last, and on which of
  // torch's streams. Null and none: no such replay has.
  const Replay* last = nullptr;
  std::optional<c10::Stream> last_stream;

  Lane finisher;  // waits for the device, ticket by ticket, where a replay has streams
  Lane lane;      // after what it uses, so that its thread ends first
};

}  // namespace offload
