// The simulated device's memory: real virtual memory of this process.
//
// A reserved range faults until memory is mapped in it, and physical memory may be mapped many
// times: both by the processor's page tables, so that kernels need no checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace simulator {

enum class MemoryKind { kPlain, kMapped, kHost };

// The fate of freed plain memory. Its bytes are first overwritten with kPoison.
enum class FreePolicy {
  kKeep,   // stays readable, so that stale reads give poison (the last 256 MiB of it)
  kUnmap,  // every access faults
  kReuse,  // the next allocation of that size gets the same address
};

inline constexpr unsigned char kPoison = 0xA5;
inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

// Physical memory: an anonymous file. Lives while a handle or a mapping holds it.
struct Chunk {
  explicit Chunk(std::size_t size_bytes);
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  const std::size_t n_bytes;
  std::uint64_t handle = 0;
  int file = -1;
};

// A range of addresses that can be read, written, or copied from and to.
struct Allocation {
  std::uint64_t begin = 0;
  std::size_t n_bytes = 0;
  std::uint64_t id = 0;  // unique in the process
  MemoryKind kind = MemoryKind::kPlain;
  bool accessible = true;        // a mapping is not, until access is set
  std::shared_ptr<Chunk> chunk;  // of a mapping
};

// Owner: the device. Thread: under the device's mutex. Errors: DeviceError, as each function says.
class Memory {
 public:
  Memory() = default;
  ~Memory() { reset(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Plain memory, aligned to a page or more, filled with poison, with guard pages on both sides.
  // Errors: kInvalidValue for zero bytes, kOutOfMemory beyond the limit.
  std::uint64_t allocate(std::size_t n_bytes, std::size_t alignment_bytes = kPageBytes);
  // Errors: kInvalidValue unless `address` is what allocate returned.
  void free(std::uint64_t address);
  // Host memory that counts as pinned; errors as above.
  std::uint64_t allocate_host(std::size_t n_bytes);
  void free_host(std::uint64_t address);
  // Makes the caller's memory count as pinned. Errors: kInvalidValue for zero bytes,
  // kAlreadyRegistered where some of it is.
  void register_host(std::uint64_t address, std::size_t n_bytes);
  // Errors: kNotRegistered unless the address was given to register_host.
  void unregister_host(std::uint64_t address);

  // Addresses without memory. `alignment_bytes` is 0 or a power of two; `wanted` is a hint.
  // Errors: kInvalidValue for a size that is not a multiple of the granularity.
  std::uint64_t reserve(std::size_t n_bytes, std::size_t alignment_bytes, std::uint64_t wanted);
  // Errors: kInvalidValue unless exactly this range was reserved and nothing is mapped in it.
  void unreserve(std::uint64_t address, std::size_t n_bytes);
  // The bytes of the reservation that begins there. Errors: kInvalidValue if none does.
  std::size_t reserved_bytes(std::uint64_t address) const;
  // Physical memory. Errors: kInvalidValue for a size that is not a multiple of the granularity,
  // kOutOfMemory beyond the limit.
  std::shared_ptr<Chunk> create(std::size_t n_bytes);
  // The bytes of physical memory. Errors: kInvalidValue for an unknown handle.
  std::size_t chunk_bytes(std::uint64_t handle) const;
  // Errors: kInvalidValue for an unknown handle. The memory is freed with its last mapping.
  void release(std::uint64_t handle);
  // Errors: kInvalidValue for an unknown handle, a range that is not reserved or already mapped,
  // an offset that is not 0 or a size that the chunk does not have.
  void map(std::uint64_t address, std::size_t n_bytes, std::size_t offset_bytes,
           std::uint64_t handle);
  // Errors: kInvalidValue unless the range consists of whole mappings.
  void unmap(std::uint64_t address, std::size_t n_bytes);
  void set_access(std::uint64_t address, std::size_t n_bytes, bool readable, bool writable);

  // The allocation that holds the address, or null.
  const Allocation* find(std::uint64_t address) const;
  // The allocations that hold [address, address + n_bytes) without a hole; empty if there is one
  // or the device may not access some of it.
  std::vector<const Allocation*> covering(std::uint64_t address, std::size_t n_bytes) const;

  // Plain bytes that are allocated.
  std::size_t live_bytes() const { return live_bytes_; }
  // Plain bytes and chunks that exist.
  std::size_t physical_bytes() const;
  std::size_t host_bytes() const { return host_bytes_; }
  std::size_t n_host() const;  // allocations of the host, without registered ones
  std::size_t n_reservations() const { return reservations_.size(); }
  std::size_t n_mappings() const;
  std::size_t n_chunks() const { return chunks_.size(); }  // whose handles were not released
  std::size_t limit_bytes() const { return limit_bytes_; }
  void set_limit(std::size_t n_bytes) { limit_bytes_ = n_bytes; }
  void set_free_policy(FreePolicy policy) { policy_ = policy; }
  // The unit in which physical memory is made, reserved and mapped. A power of two, and at least a
  // page, else kInvalidValue.
  std::size_t granularity_bytes() const { return granularity_bytes_; }
  void set_granularity(std::size_t n_bytes);

  // Frees everything, and restores the default limit, policy and granularity.
  void reset();

 private:
  struct Block {  // a plain allocation's pages, guards included
    std::uint64_t begin;
    std::size_t n_bytes;
  };

  std::uint64_t add(std::uint64_t begin, std::size_t n_bytes, MemoryKind kind,
                    std::shared_ptr<Chunk> chunk);
  std::uint64_t remove(std::uint64_t address, MemoryKind kind);
  std::vector<std::uint64_t> whole_mappings(std::uint64_t address, std::size_t n_bytes) const;
  void require_room(std::size_t n_bytes) const;
  bool is_whole(std::size_t n_bytes) const {
    return n_bytes != 0 && n_bytes % granularity_bytes_ == 0;
  }
  void keep(std::uint64_t address, std::size_t n_bytes);

  static constexpr std::size_t kDefaultLimitBytes = std::size_t{16} << 30;
  std::map<std::uint64_t, Allocation> allocations_;  // by address
  std::map<std::uint64_t, std::size_t> reservations_;
  std::map<std::uint64_t, std::size_t> registered_;         // of the host, by address
  std::map<std::uint64_t, std::shared_ptr<Chunk>> chunks_;  // handles that were not released
  std::vector<std::weak_ptr<Chunk>> all_chunks_;
  std::map<std::uint64_t, Block> blocks_;                   // by the returned address
  std::multimap<std::size_t, std::uint64_t> reusable_;      // freed: bytes, address
  std::deque<std::pair<std::uint64_t, std::size_t>> kept_;  // freed: address, bytes
  std::size_t kept_bytes_ = 0;
  FreePolicy policy_ = FreePolicy::kKeep;
  std::size_t limit_bytes_ = kDefaultLimitBytes;
  std::size_t granularity_bytes_ = kGranularityBytes;
  std::size_t live_bytes_ = 0;
  std::size_t host_bytes_ = 0;
};

}  // namespace simulator
