#include "ascend/stream_resident.hpp"

namespace offload::acl {

bool StreamResident::copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) {
  refuse_closed();
  if (!copies_on_device_) return false;
  if (n_bytes == 0) return true;
  const ContextScope scope(runtime(), device());
  note_enqueued();
  runtime().check(
      runtime().memcpy_async(reinterpret_cast<void*>(to), n_bytes, reinterpret_cast<void*>(from),
                             n_bytes, kDeviceToDevice, stream()),
      "copying to or from a buffer");
  return true;
}

}  // namespace offload::acl
