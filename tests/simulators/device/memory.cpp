#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "registry.hpp"
#include "status.hpp"

namespace simulator {
namespace {

std::size_t rounded_up(std::size_t n_bytes, std::size_t unit_bytes) {
  return (n_bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// Addresses without access. Errors: kOutOfMemory.
std::uint64_t map_nothing(std::size_t n_bytes, std::uint64_t wanted) {
  void* const begin =
      mmap(pointer(wanted), n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(begin != MAP_FAILED, Status::kOutOfMemory);
  return reinterpret_cast<std::uint64_t>(begin);
}

// Frees the memory. The addresses stay reserved, so that nothing else is placed there.
void make_unreadable(std::uint64_t address, std::size_t n_bytes) {
  madvise(pointer(address), n_bytes, MADV_DONTNEED);
  mprotect(pointer(address), n_bytes, PROT_NONE);
}

}  // namespace

Chunk::Chunk(std::size_t size_bytes) : n_bytes(size_bytes) {
  file = memfd_create("simulated device memory", MFD_CLOEXEC);
  require(file >= 0, Status::kOutOfMemory);
  void* content = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(n_bytes)) == 0) {
    content = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (content == MAP_FAILED) {
    close(file);
    throw DeviceError(Status::kOutOfMemory);
  }
  std::memset(content, kPoison, n_bytes);
  munmap(content, n_bytes);
}

Chunk::~Chunk() { close(file); }

std::uint64_t Memory::add(std::uint64_t begin, std::size_t n_bytes, MemoryKind kind,
                          std::shared_ptr<Chunk> chunk) {
  Allocation allocation;
  allocation.begin = begin;
  allocation.n_bytes = n_bytes;
  allocation.id = new_handle();
  allocation.kind = kind;
  allocation.accessible = chunk == nullptr;
  allocation.chunk = std::move(chunk);
  allocations_[begin] = std::move(allocation);
  return begin;
}

std::uint64_t Memory::remove(std::uint64_t address, MemoryKind kind) {
  const auto found = allocations_.find(address);
  require(found != allocations_.end() && found->second.kind == kind, Status::kInvalidValue);
  const std::size_t n_bytes = found->second.n_bytes;
  allocations_.erase(found);
  return n_bytes;
}

void Memory::require_room(std::size_t n_bytes) const {
  const std::size_t used_bytes = physical_bytes();
  require(used_bytes <= limit_bytes_ && n_bytes <= limit_bytes_ - used_bytes, Status::kOutOfMemory);
}

std::uint64_t Memory::allocate(std::size_t n_bytes, std::size_t alignment_bytes) {
  require(n_bytes != 0, Status::kInvalidValue);
  require_room(n_bytes);
  const std::size_t content_bytes = rounded_up(n_bytes, kPageBytes);
  std::uint64_t address = 0;
  const auto again = reusable_.find(content_bytes);
  if (policy_ == FreePolicy::kReuse && again != reusable_.end() &&
      again->second % alignment_bytes == 0) {
    address = again->second;
    reusable_.erase(again);
  } else {
    const std::size_t block_bytes = content_bytes + alignment_bytes + kPageBytes;
    const std::uint64_t begin = map_nothing(block_bytes, 0);
    address = rounded_up(begin + kPageBytes, alignment_bytes);
    mprotect(pointer(address), content_bytes, PROT_READ | PROT_WRITE);
    blocks_[address] = {begin, block_bytes};
  }
  std::memset(pointer(address), kPoison, content_bytes);
  live_bytes_ += n_bytes;
  return add(address, n_bytes, MemoryKind::kPlain, nullptr);
}

void Memory::free(std::uint64_t address) {
  const std::size_t n_bytes = remove(address, MemoryKind::kPlain);
  live_bytes_ -= n_bytes;
  const std::size_t content_bytes = rounded_up(n_bytes, kPageBytes);
  std::memset(pointer(address), kPoison, content_bytes);
  if (policy_ == FreePolicy::kReuse) reusable_.emplace(content_bytes, address);
  if (policy_ == FreePolicy::kUnmap) make_unreadable(address, content_bytes);
  if (policy_ == FreePolicy::kKeep) keep(address, content_bytes);
}

void Memory::keep(std::uint64_t address, std::size_t n_bytes) {
  constexpr std::size_t kMostBytes = std::size_t{256} << 20;
  kept_.emplace_back(address, n_bytes);
  kept_bytes_ += n_bytes;
  while (kept_bytes_ > kMostBytes) {
    make_unreadable(kept_.front().first, kept_.front().second);
    kept_bytes_ -= kept_.front().second;
    kept_.pop_front();
  }
}

std::uint64_t Memory::allocate_host(std::size_t n_bytes) {
  require(n_bytes != 0, Status::kInvalidValue);
  const std::size_t content_bytes = rounded_up(n_bytes, kPageBytes);
  const std::uint64_t address = map_nothing(content_bytes, 0);
  mprotect(pointer(address), content_bytes, PROT_READ | PROT_WRITE);
  std::memset(pointer(address), kPoison, content_bytes);
  host_bytes_ += n_bytes;
  return add(address, n_bytes, MemoryKind::kHost, nullptr);
}

void Memory::free_host(std::uint64_t address) {
  require(registered_.find(address) == registered_.end(), Status::kInvalidValue);
  const std::size_t n_bytes = remove(address, MemoryKind::kHost);
  host_bytes_ -= n_bytes;
  munmap(pointer(address), rounded_up(n_bytes, kPageBytes));
}

std::size_t Memory::n_host() const {
  const auto is_host = [](const auto& one) { return one.second.kind == MemoryKind::kHost; };
  return static_cast<std::size_t>(
             std::count_if(allocations_.begin(), allocations_.end(), is_host)) -
         registered_.size();
}

void Memory::register_host(std::uint64_t address, std::size_t n_bytes) {
  require(n_bytes != 0, Status::kInvalidValue);
  const auto after = allocations_.lower_bound(address + n_bytes);
  if (after != allocations_.begin()) {
    const Allocation& before = std::prev(after)->second;
    require(before.begin + before.n_bytes <= address, Status::kAlreadyRegistered);
  }
  registered_[add(address, n_bytes, MemoryKind::kHost, nullptr)] = n_bytes;
  host_bytes_ += n_bytes;
}

void Memory::unregister_host(std::uint64_t address) {
  require(registered_.erase(address) == 1, Status::kNotRegistered);
  host_bytes_ -= remove(address, MemoryKind::kHost);
}

void Memory::set_granularity(std::size_t n_bytes) {
  require(n_bytes >= kPageBytes && (n_bytes & (n_bytes - 1)) == 0, Status::kInvalidValue);
  granularity_bytes_ = n_bytes;
}

std::uint64_t Memory::reserve(std::size_t n_bytes, std::size_t alignment_bytes,
                              std::uint64_t wanted) {
  require(is_whole(n_bytes), Status::kInvalidValue);
  require((alignment_bytes & (alignment_bytes - 1)) == 0, Status::kInvalidValue);
  const std::size_t unit_bytes = std::max(alignment_bytes, granularity_bytes_);
  const std::size_t whole_bytes = n_bytes + unit_bytes;
  const std::uint64_t begin = map_nothing(whole_bytes, wanted);
  // A hint that was followed begins there; otherwise the first aligned address.
  const std::uint64_t address = rounded_up(begin, unit_bytes);
  if (address != begin) munmap(pointer(begin), address - begin);
  munmap(pointer(address + n_bytes), begin + whole_bytes - address - n_bytes);
  reservations_[address] = n_bytes;
  return address;
}

void Memory::unreserve(std::uint64_t address, std::size_t n_bytes) {
  const auto found = reservations_.find(address);
  require(found != reservations_.end() && found->second == n_bytes, Status::kInvalidValue);
  const auto mapped = allocations_.lower_bound(address);
  require(mapped == allocations_.end() || mapped->first >= address + n_bytes,
          Status::kInvalidValue);
  munmap(pointer(address), n_bytes);
  reservations_.erase(found);
}

std::size_t Memory::reserved_bytes(std::uint64_t address) const {
  const auto found = reservations_.find(address);
  require(found != reservations_.end(), Status::kInvalidValue);
  return found->second;
}

std::shared_ptr<Chunk> Memory::create(std::size_t n_bytes) {
  require(is_whole(n_bytes), Status::kInvalidValue);
  require_room(n_bytes);
  auto chunk = std::make_shared<Chunk>(n_bytes);
  chunk->handle = new_handle();
  chunks_[chunk->handle] = chunk;
  all_chunks_.push_back(chunk);
  return chunk;
}

std::size_t Memory::chunk_bytes(std::uint64_t handle) const {
  const auto found = chunks_.find(handle);
  require(found != chunks_.end(), Status::kInvalidValue);
  return found->second->n_bytes;
}

void Memory::release(std::uint64_t handle) {
  require(chunks_.erase(handle) == 1, Status::kInvalidValue);
}

void Memory::map(std::uint64_t address, std::size_t n_bytes, std::size_t offset_bytes,
                 std::uint64_t handle) {
  const auto chunk = chunks_.find(handle);
  require(chunk != chunks_.end(), Status::kInvalidValue);
  require(is_whole(n_bytes) && offset_bytes == 0 && n_bytes <= chunk->second->n_bytes,
          Status::kInvalidValue);
  auto reservation = reservations_.upper_bound(address);
  require(reservation != reservations_.begin(), Status::kInvalidValue);
  --reservation;
  require(address % granularity_bytes_ == 0 &&
              address + n_bytes <= reservation->first + reservation->second,
          Status::kInvalidValue);
  const auto next = allocations_.lower_bound(address);
  require(
      find(address) == nullptr && (next == allocations_.end() || next->first >= address + n_bytes),
      Status::kInvalidValue);
  void* const mapped =
      mmap(pointer(address), n_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->second->file, 0);
  require(mapped != MAP_FAILED, Status::kOutOfMemory);
  add(address, n_bytes, MemoryKind::kMapped, chunk->second);
}

std::vector<std::uint64_t> Memory::whole_mappings(std::uint64_t address,
                                                  std::size_t n_bytes) const {
  std::vector<std::uint64_t> result;
  std::uint64_t at = address;
  while (at < address + n_bytes) {
    const auto found = allocations_.find(at);
    require(found != allocations_.end() && found->second.kind == MemoryKind::kMapped,
            Status::kInvalidValue);
    result.push_back(at);
    at += found->second.n_bytes;
  }
  require(at == address + n_bytes && !result.empty(), Status::kInvalidValue);
  return result;
}

void Memory::unmap(std::uint64_t address, std::size_t n_bytes) {
  for (const std::uint64_t begin : whole_mappings(address, n_bytes)) allocations_.erase(begin);
  mmap(pointer(address), n_bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void Memory::set_access(std::uint64_t address, std::size_t n_bytes, bool readable, bool writable) {
  for (const std::uint64_t begin : whole_mappings(address, n_bytes)) {
    allocations_[begin].accessible = readable;
  }
  const int protection = (readable ? PROT_READ : PROT_NONE) | (writable ? PROT_WRITE : PROT_NONE);
  mprotect(pointer(address), n_bytes, protection);
}

const Allocation* Memory::find(std::uint64_t address) const {
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return nullptr;
  --found;
  return address - found->first < found->second.n_bytes ? &found->second : nullptr;
}

std::vector<const Allocation*> Memory::covering(std::uint64_t address, std::size_t n_bytes) const {
  std::vector<const Allocation*> result;
  std::uint64_t at = address;
  do {
    const Allocation* const found = find(at);
    if (found == nullptr || !found->accessible) return {};
    result.push_back(found);
    at = found->begin + found->n_bytes;
  } while (at < address + n_bytes);
  return result;
}

std::size_t Memory::physical_bytes() const {
  std::size_t n_bytes = live_bytes_;
  for (const auto& chunk : all_chunks_) {
    if (const auto alive = chunk.lock()) n_bytes += alive->n_bytes;
  }
  return n_bytes;
}

std::size_t Memory::n_mappings() const {
  return static_cast<std::size_t>(
      std::count_if(allocations_.begin(), allocations_.end(),
                    [](const auto& entry) { return entry.second.kind == MemoryKind::kMapped; }));
}

void Memory::reset() {
  for (const auto& [address, allocation] : allocations_) {
    const bool is_own = registered_.find(address) == registered_.end();
    if (allocation.kind == MemoryKind::kHost && is_own) {
      munmap(pointer(address), rounded_up(allocation.n_bytes, kPageBytes));
    }
  }
  for (const auto& [address, block] : blocks_) munmap(pointer(block.begin), block.n_bytes);
  for (const auto& [address, n_bytes] : reservations_) munmap(pointer(address), n_bytes);
  allocations_.clear();
  registered_.clear();
  blocks_.clear();
  reusable_.clear();
  kept_.clear();
  reservations_.clear();
  chunks_.clear();
  all_chunks_.clear();
  policy_ = FreePolicy::kKeep;
  limit_bytes_ = kDefaultLimitBytes;
  granularity_bytes_ = kGranularityBytes;
  live_bytes_ = host_bytes_ = kept_bytes_ = 0;
}

}  // namespace simulator
