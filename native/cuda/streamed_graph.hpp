// Copies of streamed weights as nodes of a resident graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
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

// The copy nodes of a graph, and where each was last told to read. What they are given has to be
// memory of the context of what they had (CUDA driver API, cuGraphExecMemcpyNodeSetParams), which
// slabs of one device's store are.
//
// Owner: one resident. Thread: callers serialise, with a current context.
class CopyNodes {
 public:
  // The first and the last node of each copy, in the order of StreamedGraph.
  std::vector<std::pair<GraphNode, GraphNode>> ends() const;

  // Lets the nodes read where the weights' copies do now: those of the graph that others are made
  // of, and of the executable graph (null: there is none). Whether any has moved; another graph
  // that was made before is then to be made anew. Throws ExecutionError; the nodes that were not
  // set are then set by the next call.
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
// `weights.ready()`. A run of more than 256 MiB is several nodes: a node of 512 MiB took twice as
// long as an ordinary copy (PyTorch's issue 191284). `nodes`: the captured ones, in `graph`.
//
// Throws ExecutionError where the driver fails, or the graph has another number of nodes than was
// added; std::invalid_argument for a node, or a list of transfers, that does not fit.
CopyNodes add_copies(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes,
                     const StreamedGraph& streamed, const CudaWeightStream& weights,
                     Context context);

}  // namespace offload::cuda
