#include "ascend/kernel_binary.hpp"

namespace offload::acl {

KernelBinary::KernelBinary(int device, const std::string& image)
    : runtime_(Runtime::get()), device_(runtime_, device) {
  runtime_.require(Capability::kKernelLaunch, "loading kernels");
  const ContextScope scope(runtime_, device_);
  runtime_.check(runtime_.binary_load(image.data(), image.size(), nullptr, &binary_),
                 "loading an image of kernels");
}

KernelBinary::~KernelBinary() {
  const ContextScope scope(runtime_, device_);
  runtime_.binary_unload(binary_);
}

Function KernelBinary::function(const std::string& name) const {
  const ContextScope scope(runtime_, device_);
  Function found = nullptr;
  const Error error = runtime_.binary_get_function(binary_, name.c_str(), &found);
  if (error != kSuccess) runtime_.fail(error, "finding kernel " + name);
  return found;
}

}  // namespace offload::acl
