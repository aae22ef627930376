// Measured durations of copies from the host to an Ascend device.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace offload::acl {

// Times in ns of single copies from pinned memory of the host, by their bytes: several of each of
// four sizes, by events on a separate stream. Throws BackendUnavailable without the device,
// ExecutionError where it fails or has no memory; nothing is left behind.
std::vector<std::pair<std::size_t, double>> sample_link(int device);

}  // namespace offload::acl
