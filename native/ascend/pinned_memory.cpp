#include "ascend/pinned_memory.hpp"

#include <string>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload::acl {

PinnedMemory::PinnedMemory(const Runtime& runtime, std::size_t n_bytes) : runtime_(runtime) {
  if (n_bytes == 0) return;
  void* address = nullptr;
  const Error error = runtime_.malloc_host(&address, whole_pages(n_bytes));
  if (error != kSuccess) {
    throw ExecutionError("allocating " + std::to_string(n_bytes) +
                         " bytes of pinned host memory, of which the system may limit how much "
                         "there can be (ulimit -l, the control group): " +
                         runtime_.describe(error));
  }
  data_ = static_cast<std::byte*>(address);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) runtime_.free_host(data_);
}

}  // namespace offload::acl
