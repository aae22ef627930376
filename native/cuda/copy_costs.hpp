// Measured costs of a slot's new address: re-setting the nodes that hold it, or copying.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

// Measured times in ns, each of one call or one copy.
struct CopySamples {
  std::vector<double> set_node_ns;  // host time of cuGraphExecKernelNodeSetParams
  std::vector<double> submit_ns;    // host time of enqueuing a copy on the device
  std::vector<std::pair<std::size_t, double>> device_ns;  // device time, by the bytes of a copy
};

// Measures on a separate stream, memory and graph, all of which are released when it returns or
// throws. The graph has a few nodes like `kernel`, a kernel node of any graph, whose packed
// arguments hold an address at `offset_bytes`. It is uploaded but never launched, since no memory
// lies at its addresses; the samples therefore exclude the effect of re-set nodes on the next
// launch.
//
// Thread: any, with a current context and captures relaxed. Waits only for its own copies. Errors:
// ExecutionError where the driver fails or lacks 8 MiB of memory; std::invalid_argument if the
// arguments hold no such word.
CopySamples sample_copy_costs(const Driver& driver, Context context, GraphNode kernel,
                              std::size_t offset_bytes);

}  // namespace offload::cuda
