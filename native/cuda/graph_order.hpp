// In which order the nodes of a graph may run.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// The edges of a graph, from and to. Throws ExecutionError where the driver fails.
std::vector<std::pair<GraphNode, GraphNode>> edges_of(const Driver& driver, Graph graph);

// The place of each node in an order that all edges allow, the lower index first where they leave
// it open. Throws ExecutionError where the driver fails.
std::vector<std::size_t> order_of(const Driver& driver, Graph graph,
                                  const std::vector<GraphNode>& nodes);

}  // namespace offload::cuda
