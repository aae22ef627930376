// Copies of streamed weights as nodes of a resident graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/cuda_weight_stream.hpp"

namespace offload::cuda {

// A transfer in a graph, and the captured nodes that it is ordered with, by position.
struct StreamedCopy {
  std::size_t transfer = 0;
  std::vector<std::uint32_t> after;   // they read what it overwrites
  std::vector<std::uint32_t> before;  // they read what it brings; none where for_next_pass
  bool for_next_pass = false;
};

// What is added to a graph: copies in the order in which they run, and after which captured nodes
// the outputs are ready.
struct StreamedGraph {
  std::vector<StreamedCopy> copies;
  std::vector<std::uint32_t> ready_after;
};

// The nodes of each copy, by its place in StreamedGraph: the first and the last.
struct CopyNodes {
  std::vector<GraphNode> first;
  std::vector<GraphNode> last;
};

// Adds one copy node for each transfer, in a chain, and the node that records `weights.ready()`. A
// copy of more than 256 MiB is several nodes: a node of 512 MiB took twice as long as an ordinary
// copy (PyTorch's issue 191284). `nodes`: the captured ones, in `graph`. Gives those of copies.
//
// Throws ExecutionError where the driver fails, or the graph has another number of nodes than was
// added; std::invalid_argument for a node, or a list of transfers, that does not fit.
CopyNodes add_copies(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes,
                     const StreamedGraph& streamed, const CudaWeightStream& weights,
                     Context context);

}  // namespace offload::cuda
