// The nodes of a graph: their edges, the order in which they may run, and those of clones.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// The edges of a graph, from and to. Throws ExecutionError where the driver fails.
std::vector<std::pair<GraphNode, GraphNode>> edges_of(const Driver& driver, Graph graph);

// Those nodes of a clone that nodes of the graph that it was made of have become. Throws
// ExecutionError where the driver fails.
std::vector<GraphNode> nodes_in_clone(const Driver& driver, Graph clone,
                                      const std::vector<GraphNode>& originals);

// The place of each node in an order that all edges allow, the lower index first where they leave
// it open. Throws ExecutionError where the driver fails.
std::vector<std::size_t> order_of(const Driver& driver, Graph graph,
                                  const std::vector<GraphNode>& nodes);

}  // namespace offload::cuda
