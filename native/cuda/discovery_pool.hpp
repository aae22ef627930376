// Addresses for discovery: the place of each allocation of a program while it is captured.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/memory.hpp"

namespace offload::cuda {

struct PoolEvent {
  bool is_allocation = true;  // otherwise a free
  DevicePointer address = 0;
  std::size_t size_bytes = 0;
};

// One layout without reuse: every allocation has a unique address between guard gaps of at least 1
// MiB, where nothing is mapped. All addresses show the same physical chunk, since a capture
// executes nothing; large allocations may show another, larger chunk, as mapping many small ones
// takes time (some 0.3 ms for each that is mapped). The seed moves the first address, the gaps, and
// the place within a chunk (by multiples of 512 B, the alignment of torch's allocator), so that no
// integer looks like the same (allocation, offset) in layouts of different seeds.
//
// Owner: shared by the discovery and the caller that made it current. Addresses are valid until it
// is destroyed, which waits for nothing: no work may have been executed on them. Thread: any.
// Errors: the constructor throws BackendUnavailable; the constructor and allocate throw
// ExecutionError.
class DiscoveryPool {
 public:
  // `large_chunk_bytes`: size of the chunk that allocations of at least a quarter of it show,
  // rounded up to whole chunks; 0: all allocations show the small chunk.
  DiscoveryPool(int device, std::uint64_t seed, std::size_t large_chunk_bytes = 0);

  // A new address for `size_bytes`, which may be 0. Does not disturb a stream capture on this
  // thread.
  DevicePointer allocate(std::size_t size_bytes);

  // From the next layout on, places allocation `number` (counted from 0 in each layout) at this
  // address of the caller's memory in all layouts; others keep their places. Nothing is mapped
  // there. The memory must outlive every use of the address.
  void fix(std::size_t number, DevicePointer address);

  // Records a free; the address is not reused. Addresses of other pools are ignored.
  void free(DevicePointer address);

  // Allocations and frees in order since the pool was made or rewound, from number `begin` on;
  // empty if it is beyond the last.
  std::vector<PoolEvent> events(std::size_t begin = 0) const;
  std::size_t n_events() const;

  // Addresses at which a chunk is shown as a whole, for each shown chunk, with its bytes.
  std::vector<std::pair<DevicePointer, std::size_t>> shown() const;

  // Restarts the layout: the same sizes in the same order get the same addresses. Earlier
  // allocations stay mapped.
  void rewind();

  // The error of the last allocation through the C function, which cannot throw.
  std::optional<std::string> error() const;
  void note_error(const std::string& message);

  // The pool that the C functions use, or null.
  static void set_current(std::shared_ptr<DiscoveryPool> pool);
  static std::shared_ptr<DiscoveryPool> current();

 private:
  struct Area {
    AddressRange range;
    std::vector<bool> mapped;  // by chunk
  };

  std::uint64_t random();
  DevicePointer place(std::size_t n_bytes);
  std::size_t unit_bytes(std::size_t n_bytes) const;
  void show_chunks(Area& area, DevicePointer begin, std::size_t n_bytes, std::size_t unit_bytes);
  void show(Area& area, DevicePointer at, const PhysicalMemory& chunk);

  const Driver& driver_;
  PrimaryContext context_;
  std::size_t chunk_bytes_;
  PhysicalMemory chunk_;
  std::optional<PhysicalMemory> large_chunk_;
  std::uint64_t seed_;
  mutable std::mutex mutex_;
  std::uint64_t random_state_;
  std::vector<Area> areas_;
  std::size_t area_ = 0;           // of the next allocation
  std::size_t n_chunks_used_ = 0;  // in that area
  std::vector<PoolEvent> events_;
  std::map<std::size_t, DevicePointer> fixed_;
  std::size_t n_allocated_ = 0;  // in this layout
  std::vector<std::pair<DevicePointer, std::size_t>> shown_;
  std::optional<std::string> error_;
};

}  // namespace offload::cuda

// For torch.cuda.memory.CUDAPluggableAllocator, on the current pool. Malloc returns null if there
// is no pool or the pool fails (see its error()).
extern "C" {
__attribute__((visibility("default"))) void* offload_cuda_pool_malloc(std::ptrdiff_t size_bytes,
                                                                      int device, void* stream);
__attribute__((visibility("default"))) void offload_cuda_pool_free(void* address,
                                                                   std::ptrdiff_t size_bytes,
                                                                   int device, void* stream);
}
