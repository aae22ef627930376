// Host memory from which an Ascend device copies.
#pragma once

#include "ascend/runtime.hpp"
#include "streaming/host_memory.hpp"

namespace offload::acl {

// Pinned memory of the runtime (aclrtMallocHost). A model refuses copies from pageable memory; and
// registering pages as pinned (aclrtHostRegisterV2) guarantees nothing: a driver without that
// feature notes the range without locking it, and host kernels up to 5.10 lack it.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError, never OutOfMemory, which is for the device's memory; it leaves
// nothing behind.
class PinnedMemory final : public HostMemory {
 public:
  PinnedMemory(const Runtime& runtime, std::size_t n_bytes);
  ~PinnedMemory() override;

 private:
  const Runtime& runtime_;
};

}  // namespace offload::acl
