// The calls of libascendcl.so that the operators make: nothing else of the runtime is used. The
// last is the simulator's: it counts a call for tests, and returns the code that they plan for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ascend/acl_abi.hpp"

namespace simulated_operators {

using namespace offload::acl;

using Status = std::int32_t;  // aclnnStatus, aclError

extern "C" {
Status aclrtBinaryLoadFromData(const void* data, std::size_t n_bytes,
                               const BinaryLoadOptions* options, LoadedBinary* binary);
Status aclrtBinaryGetFunction(LoadedBinary binary, const char* kernel_name, Function* function);
Status aclrtLaunchKernelWithHostArgs(Function function, std::uint32_t n_blocks, Stream stream,
                                     LaunchConfiguration* configuration, void* host_arguments,
                                     std::size_t arguments_bytes, PlaceHolder* placeholders,
                                     std::size_t n_placeholders);
Status sim_note(const char* function);
}

}  // namespace simulated_operators

#define OPERATORS_EXPORT extern "C" __attribute__((visibility("default")))
