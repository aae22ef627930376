#include "ascend/pinned_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload::acl {

PinnedMemory::PinnedMemory(const Runtime& runtime, std::size_t n_bytes)
    : runtime_(runtime), n_bytes_(n_bytes), is_registered_(runtime.has(Capability::kHostRegister)) {
  if (n_bytes == 0) return;
  if (is_registered_) {
    make_registered();
    return;
  }
  void* address = nullptr;
  const Error error = runtime_.malloc_host(&address, whole_pages(n_bytes));
  if (error != kSuccess) {
    throw ExecutionError("allocating " + std::to_string(n_bytes) +
                         " bytes of pinned host memory: " + runtime_.describe(error));
  }
  data_ = static_cast<std::byte*>(address);
}

void PinnedMemory::make_registered() {
  const std::string wanted = std::to_string(n_bytes_) + " bytes of host memory";
  data_ = map_pages(n_bytes_);
  if (data_ == nullptr)
    throw ExecutionError("there are no " + wanted + ": " + std::strerror(errno));
  const Error error = runtime_.host_register(data_, whole_pages(n_bytes_), kHostRegisterPinned);
  if (error == kSuccess) return;
  munmap(data_, whole_pages(n_bytes_));
  throw ExecutionError("registering " + wanted +
                       " with the runtime, which keeps it from being swapped out: the system may "
                       "limit how much can be (ulimit -l, the control group): " +
                       runtime_.describe(error));
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  if (!is_registered_) {
    runtime_.free_host(data_);
    return;
  }
  // Pages that the runtime still has must not become anybody else's.
  if (runtime_.host_unregister(data_) != kSuccess) return;
  munmap(data_, whole_pages(n_bytes_));
}

}  // namespace offload::acl
