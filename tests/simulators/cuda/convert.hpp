// Conversions between the driver's parameter structs and the device's work.
#pragma once

#include "driver.hpp"

namespace simulated_cuda {

// Errors of all: kInvalidValue for unsupported features (arrays) and for empty sizes;
// kInvalidHandle for an unknown function.
simulator::Copy to_copy(const Memcpy3D& params);
Memcpy3D to_params(const simulator::Copy& copy);
simulator::Fill to_fill(const MemsetNodeParams& params);
MemsetNodeParams to_params(const simulator::Fill& fill);

// Copies the arguments, from one address for each or from a packed buffer.
simulator::KernelCall to_call(simulator::Device& device, const KernelNodeParams& params);
// The result points into the node, and is valid until the node's parameters are set.
KernelNodeParams to_params(simulator::Node& node);

}  // namespace simulated_cuda
