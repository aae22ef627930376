// The nodes of a graph: their edges, an order in which they may run, and their clones.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// The edges of a graph, from and to. Throws ExecutionError where the driver fails.
std::vector<std::pair<GraphNode, GraphNode>> edges_of(const Driver& driver, Graph graph);

// The nodes of a clone that correspond to `originals`. Throws ExecutionError where the driver
// fails.
std::vector<GraphNode> nodes_in_clone(const Driver& driver, Graph clone,
                                      const std::vector<GraphNode>& originals);

// The position of each node in an order that all edges allow; ties go to the lower index. Throws
// ExecutionError where the driver fails.
std::vector<std::size_t> order_of(const Driver& driver, Graph graph,
                                  const std::vector<GraphNode>& nodes);

}  // namespace offload::cuda
