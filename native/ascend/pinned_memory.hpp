// Host memory that an Ascend device copies from by itself.
#pragma once

#include "ascend/runtime.hpp"
#include "streaming/host_memory.hpp"

namespace offload::acl {

// Anonymous pages that are registered as pinned, where the runtime has that (CANN 8.5); else pinned
// memory of the runtime's own. A copy from any other memory is refused in a model.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError, never OutOfMemory, which is the device's; it leaves nothing
// behind.
class PinnedMemory final : public HostMemory {
 public:
  PinnedMemory(const Runtime& runtime, std::size_t n_bytes);
  ~PinnedMemory() override;

 private:
  void make_registered();

  const Runtime& runtime_;
  std::size_t n_bytes_;
  bool is_registered_;
};

}  // namespace offload::acl
