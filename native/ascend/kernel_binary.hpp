// Kernels of our own in a binary image.
#pragma once

#include <string>

#include "ascend/runtime.hpp"

namespace offload::acl {

// An image of kernels, loaded on a device.
//
// Owner: the launcher of its functions; none of them may be running at its destruction. Thread:
// any. Errors: the constructor throws BackendUnavailable where the runtime launches no kernels; it
// and function throw ExecutionError, which names a missing kernel.
class KernelBinary {
 public:
  KernelBinary(int device, const std::string& image);
  ~KernelBinary();
  KernelBinary(const KernelBinary&) = delete;
  KernelBinary& operator=(const KernelBinary&) = delete;

  Function function(const std::string& name) const;

 private:
  const Runtime& runtime_;
  Device device_;
  LoadedBinary binary_ = nullptr;
};

}  // namespace offload::acl
