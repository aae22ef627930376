// The arena: physical memory of feature maps that executables share, each at separate addresses.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/memory.hpp"

namespace offload::cuda {

class ArenaMapping;

// A list of physical chunks. Every mapping shows a prefix of it, so that the physical memory is
// that of the largest mapping, and sharing requires no address to be patched. Chunks at the end are
// released with the last mapping that shows them.
//
// Owner: shared by its mappings and executables. Thread: any; an execution holds a Lease on
// lease_id() from before enter until all its work is enqueued. Errors: the constructor throws
// BackendUnavailable; the constructor, map and enter throw ExecutionError. A failed map leaves
// nothing behind.
class CudaArena : public std::enable_shared_from_this<CudaArena> {
 public:
  explicit CudaArena(int device);
  ~CudaArena();

  // Maps at least `size_bytes` at new addresses; 0: no memory, address 0.
  std::shared_ptr<ArenaMapping> map(std::size_t size_bytes);

  // Current physical memory in bytes.
  std::size_t size_bytes() const;

  // Orders what is enqueued on `stream` from here on after all earlier users of the arena. A stream
  // must not be destroyed before the arena is entered on another stream, or idle.
  void enter(Stream stream);

  // Identifies this arena among leased addresses; no memory lies there.
  std::uint64_t lease_id() const { return reinterpret_cast<std::uint64_t>(this); }

  const Driver& driver() const { return driver_; }
  const PrimaryContext& context() const { return context_; }

 private:
  friend class ArenaMapping;

  void release_unused() noexcept;

  const Driver& driver_;
  PrimaryContext context_;
  std::size_t granularity_bytes_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<PhysicalMemory>> chunks_;
  std::optional<Stream> last_stream_;
  std::optional<OrderEvent> order_;
};

// An arena's memory at one range of addresses.
//
// Owner: one executable, which must wait for its work before it releases the mapping. Thread: any.
// Keeps the chunks alive, and releases those that no other mapping shows.
class ArenaMapping {
 public:
  ArenaMapping(std::shared_ptr<CudaArena> arena, std::size_t size_bytes)
      : arena_(std::move(arena)), size_bytes_(size_bytes) {}
  ~ArenaMapping();
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;

  // 0 if there is no memory.
  DevicePointer address() const { return range_ ? range_->address() : 0; }
  std::size_t size_bytes() const { return size_bytes_; }
  bool contains(DevicePointer at) const {
    return range_ && at - range_->address() < range_->size_bytes();
  }

 private:
  friend class CudaArena;

  std::shared_ptr<CudaArena> arena_;
  std::size_t size_bytes_;
  std::vector<std::shared_ptr<PhysicalMemory>> chunks_;
  std::optional<AddressRange> range_;
};

}  // namespace offload::cuda
