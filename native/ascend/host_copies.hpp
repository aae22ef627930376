// Copies from the host whose source may change as soon as they are enqueued.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ascend/pinned_memory.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// Where the runtime stages the source (ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE, from CANN 8.5 on; older
// headers lack this kind) one call suffices. Otherwise the bytes go into pinned memory of our own,
// with one piece for each unfinished copy, at most kMostPieces; a further copy waits for the
// oldest.
//
// Owner: one resident; at its destruction the device's context must be current, and all its copies
// must have ended. Thread: callers serialise. Errors: copy throws ExecutionError, which begins with
// `what`; the copy may or may not have been enqueued then.
class HostCopies {
 public:
  static constexpr std::size_t kMostPieces = 16;

  explicit HostCopies(const Runtime& runtime) : runtime_(runtime) {}
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  void copy(void* to, const void* from, std::size_t n_bytes, Stream stream, const char* what);

 private:
  struct Piece {
    Piece(const Runtime& runtime, std::size_t n_bytes)
        : size_bytes(n_bytes), memory(runtime, n_bytes), copied(runtime) {}

    std::size_t size_bytes;
    PinnedMemory memory;
    OrderEvent copied;  // recorded after its latest copy
  };

  Piece& free_piece(std::size_t n_bytes, const char* what);

  const Runtime& runtime_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::size_t oldest_ = 0;  // the piece of the oldest copy
};

}  // namespace offload::acl
