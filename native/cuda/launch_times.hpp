// What the launches of a captured graph take on the device, one by one.
#pragma once

#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// Executes a clone of `graph` once, whose launches follow one another with an event between, and
// waits for it. `launches`: the nodes of each launch, in the order in which they were captured.
//
// Gives nanoseconds by launch, that of an event in a graph included; 0 for a launch without nodes.
// Throws ExecutionError where the driver or the device fails; nothing is left behind then. With a
// current context.
std::vector<double> time_launches(const Driver& driver, Graph graph,
                                  const std::vector<std::vector<GraphNode>>& launches);

}  // namespace offload::cuda
