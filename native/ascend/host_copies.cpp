#include "ascend/host_copies.hpp"

#include <cstring>

namespace offload::acl {

void HostCopies::copy(void* to, const void* from, std::size_t n_bytes, Stream stream,
                      const char* what) {
  if (runtime_.stages_copies()) {
    return runtime_.check(
        runtime_.memcpy_async(to, n_bytes, from, n_bytes, kHostToBufferToDevice, stream), what);
  }
  Piece& piece = free_piece(n_bytes, what);
  std::memcpy(piece.memory.data(), from, n_bytes);
  runtime_.check(
      runtime_.memcpy_async(to, n_bytes, piece.memory.data(), n_bytes, kHostToDevice, stream),
      what);
  const Error error = runtime_.record_event(piece.copied.handle(), stream);
  if (error == kSuccess) return;
  runtime_.synchronize_stream(stream);  // otherwise the end of the copy is unknown
  runtime_.fail(error, what);
}

// A larger piece replaces a piece in its place, so the order of the pieces is that of their copies.
HostCopies::Piece& HostCopies::free_piece(std::size_t n_bytes, const char* what) {
  const RelaxedCapture relaxed(runtime_);
  if (!pieces_.empty()) {
    std::unique_ptr<Piece>& oldest = pieces_[oldest_];
    EventRecordedStatus status = kEventRecordedNotReady;
    runtime_.check(runtime_.query_event(oldest->copied.handle(), &status), what);
    const bool is_free = status == kEventRecordedComplete;
    if (is_free || pieces_.size() == kMostPieces) {
      if (!is_free) runtime_.check(runtime_.synchronize_event(oldest->copied.handle()), what);
      if (oldest->size_bytes < n_bytes) oldest = std::make_unique<Piece>(runtime_, n_bytes);
      oldest_ = (oldest_ + 1) % pieces_.size();
      return *oldest;
    }
  }
  // Before the oldest, which makes it the latest.
  const auto at = pieces_.begin() + static_cast<std::ptrdiff_t>(oldest_);
  Piece& made = **pieces_.insert(at, std::make_unique<Piece>(runtime_, n_bytes));
  oldest_ = (oldest_ + 1) % pieces_.size();
  return made;
}

}  // namespace offload::acl
