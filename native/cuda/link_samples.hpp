// Measured durations of copies from the host to a device.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace offload::cuda {

// Times of single copies in ns, by their bytes, from registered host memory as large as the largest
// copy. All resources are released when it returns or throws.
//
// Thread: any. Waits only for its own copies. Errors: BackendUnavailable if there is no such
// device, ExecutionError where the driver fails or memory is lacking.
std::vector<std::pair<std::size_t, double>> sample_link(int device);

}  // namespace offload::cuda
