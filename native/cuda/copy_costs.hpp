// What a slot's new address costs, by re-setting the nodes that hold it or by copying: measured.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// Measured times in ns, of one call or of one copy each.
struct CopySamples {
  std::vector<double> set_node_ns;  // the host's, for cuGraphExecKernelNodeSetParams
  std::vector<double> submit_ns;    // the host's, for enqueuing a copy on the device
  std::vector<std::pair<std::size_t, double>> device_ns;  // the device's, by the bytes of a copy
};

// Measures on a stream, memory and a graph of its own, all of which are gone when it returns or
// throws. The graph has a few nodes like `kernel`, a kernel node of any graph, whose packed
// arguments hold an address at `offset_bytes`. It is uploaded and never launched, since nothing
// lies at its addresses: what the next launch makes of re-set nodes is not in the samples.
//
// Thread: any, with a current context and captures relaxed. Waits for its own copies alone.
// Errors: ExecutionError where the driver fails or has not 8 MiB of memory; std::invalid_argument
// if the arguments hold no such word.
CopySamples sample_copy_costs(const Driver& driver, Context context, GraphNode kernel,
                              std::size_t offset_bytes);

}  // namespace offload::cuda
