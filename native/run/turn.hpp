// Turns: what executables share that execute one at a time.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "offload/lane.hpp"

namespace offload {

// The order of executions, and the memory that their activations use in turn.
//
// Owner: shared by its replays; each has its own until it joins another's. Thread: members besides
// the lane change only under the lane's execution mutex.
struct Turn {
  bool running = false;  // one of its replays is executing
  c10::DataPtr arena;    // if the device has no arena
  std::size_t arena_bytes = 0;
  Lane lane;  // last, so that its thread ends before what it uses
};

}  // namespace offload
