// Copies of streamed weights as nodes of a resident graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/cuda_weight_stream.hpp"

namespace offload::cuda {

// A transfer in a graph, and the captured nodes with which it is ordered, by position.
struct StreamedCopy {
  std::size_t transfer = 0;
  std::vector<std::uint32_t> after;   // they read what it overwrites
  std::vector<std::uint32_t> before;  // they read the piece; empty if for_next_pass
  bool for_next_pass = false;
};

// Additions to a graph: copies in the order in which they run, and the captured nodes after which
// the outputs are ready.
struct StreamedGraph {
  std::vector<StreamedCopy> copies;
  std::vector<std::uint32_t> ready_after;
};

// The copy nodes of a graph, and the source that each was last given. A new source must be memory
// of the same context as the former (CUDA driver API, cuGraphExecMemcpyNodeSetParams), which holds
// for slabs of one device's store.
//
// Owner: one resident. Thread: callers serialise, with a current context.
class CopyNodes {
 public:
  // The first and last node of each copy, in the order of StreamedGraph.
  std::vector<std::pair<GraphNode, GraphNode>> ends() const;

  // Sets the nodes to the current sources of the weights' copies: those of the template graph, and
  // of the executable graph (null: there is none). Returns whether a source has moved; other graphs
  // made before must then be made again. Throws ExecutionError; the next call then sets the nodes
  // that were not set.
  bool follow(const Driver& driver, GraphExec exec, const CudaWeightStream& weights,
              Context context);

 private:
  friend class CopyBuilder;

  struct Part {
    GraphNode node;
    std::size_t transfer;
    std::size_t run;           // of the transfer
    std::size_t offset_bytes;  // in the run
    std::uint64_t to;
    std::size_t n_bytes;
    const std::byte* from;
  };

  std::vector<Part> parts_;
};

// Adds a copy node for each run of each transfer, in a chain, and the node that records
// `weights.ready()`. A run of more than 256 MiB becomes several nodes: a node of 512 MiB took twice
// as long as an ordinary copy (PyTorch's issue 191284). `nodes`: the captured ones, in `graph`.
//
// Throws ExecutionError where the driver fails, or if the graph's number of nodes differs from what
// was added; std::invalid_argument for a node, or a list of transfers, that does not fit.
CopyNodes add_copies(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes,
                     const StreamedGraph& streamed, const CudaWeightStream& weights,
                     Context context);

}  // namespace offload::cuda
