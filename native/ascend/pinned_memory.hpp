// Host memory that an Ascend device copies from by itself.
#pragma once

#include "ascend/runtime.hpp"
#include "streaming/host_memory.hpp"

namespace offload::acl {

// Pinned memory of the runtime's own (aclrtMallocHost). A copy from pageable memory is refused in a
// model; and registering pages as pinned (aclrtHostRegisterV2) promises nothing: a driver without
// that feature notes the range and locks nothing, and host kernels 5.10 and older do not have it.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError, never OutOfMemory, which is the device's; it leaves nothing
// behind.
class PinnedMemory final : public HostMemory {
 public:
  PinnedMemory(const Runtime& runtime, std::size_t n_bytes);
  ~PinnedMemory() override;

 private:
  const Runtime& runtime_;
};

}  // namespace offload::acl
