// Turns: what executables have in common that execute one at a time.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "offload/lane.hpp"

namespace offload {

// The order of executions, and the memory that activations of one after the other lie in.
//
// Owner: shared by its replays, each of which has one of its own until it joins another's. Thread:
// what stands beside the lane changes under the lane's execution mutex alone.
struct Turn {
  bool running = false;  // one of its replays is executing
  c10::DataPtr arena;    // where the device has no other
  std::size_t arena_bytes = 0;
  Lane lane;  // after what it uses, so that its thread ends first
};

}  // namespace offload
