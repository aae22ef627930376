// The common part of residents on an Ascend device.
#pragma once

#include <cstdint>

#include "ascend/ascend_streams.hpp"
#include "device/stream_resident.hpp"

namespace offload::acl {

// A resident on an Ascend device.
//
// Owner, thread, errors: as offload::StreamResident; the constructor also throws
// BackendUnavailable.
class StreamResident : public offload::StreamResident<AscendStreams> {
 public:
  bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) final;

 protected:
  // `copies_on_device`: tensors lie in the device's memory, so that `copy` copies them there.
  StreamResident(int device, bool copies_on_device)
      : offload::StreamResident<AscendStreams>(AscendStreams(Runtime::get(), device)),
        copies_on_device_(copies_on_device) {}

  const Runtime& runtime() const { return streams().runtime(); }
  const Device& device() const { return streams().device(); }

 private:
  bool copies_on_device_;
};

}  // namespace offload::acl
