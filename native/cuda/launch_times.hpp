// Durations of the launches of a captured graph on the device.
#pragma once

#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// Executes a clone of `graph` once, with its launches in sequence and an event between each two,
// and waits for it. `launches`: the nodes of each launch, in captured order.
//
// Returns nanoseconds by launch, including an event in a graph; 0 for a launch without nodes.
// Throws ExecutionError where the driver or the device fails, and leaves nothing behind. With a
// current context.
std::vector<double> time_launches(const Driver& driver, Graph graph,
                                  const std::vector<std::vector<GraphNode>>& launches);

}  // namespace offload::cuda
