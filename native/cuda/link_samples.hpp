// What copies from the host to a device take: measured.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace offload::cuda {

// Times of single copies in ns, by their bytes, from registered memory of the host as large as the
// largest of them. All that it is measured with is gone when it returns or throws.
//
// Thread: any. Waits for its own copies alone. Errors: BackendUnavailable without the device,
// ExecutionError where the driver fails or there is no memory for it.
std::vector<std::pair<std::size_t, double>> sample_link(int device);

}  // namespace offload::cuda
