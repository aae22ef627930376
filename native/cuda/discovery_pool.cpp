#include "cuda/discovery_pool.hpp"

#include <algorithm>
#include <exception>

namespace offload::cuda {
namespace {

constexpr std::size_t kAreaBytes = std::size_t{64} << 30;  // of addresses, which cost nothing
constexpr std::size_t kSkewUnitBytes = 512;                // torch's kMinBlockSize
constexpr std::size_t kGuardBytes = std::size_t{1} << 20;
constexpr std::uint64_t kFirstChunks = 1024;  // limit of chunks before the first allocation
constexpr std::uint64_t kGapChunks = 16;      // limit of chunks between later allocations

struct Current {
  std::mutex mutex;
  std::shared_ptr<DiscoveryPool> pool;
};

Current& the_current() {
  static auto* const instance = new Current;  // never destroyed: torch may free at exit
  return *instance;
}

}  // namespace

DiscoveryPool::DiscoveryPool(int device, std::uint64_t seed, std::size_t large_chunk_bytes)
    : driver_(Driver::get()),
      context_(driver_, device),
      chunk_bytes_(granularity_bytes(driver_, context_.device())),
      chunk_(driver_, context_.device(), chunk_bytes_),
      seed_(seed),
      random_state_(seed) {
  if (large_chunk_bytes > chunk_bytes_) {
    large_chunk_.emplace(driver_, context_.device(), round_up(large_chunk_bytes, chunk_bytes_));
  }
}

// SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
std::uint64_t DiscoveryPool::random() {
  std::uint64_t bits = random_state_ += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

DevicePointer DiscoveryPool::allocate(std::size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  const auto fixed = fixed_.find(n_allocated_);
  // Placed in any case, so that later allocations keep their places.
  const DevicePointer placed = place(size_bytes);
  const DevicePointer address = fixed == fixed_.end() ? placed : fixed->second;
  ++n_allocated_;
  events_.push_back({true, address, size_bytes});
  return address;
}

// The place of the next allocation, with the chunk shown there. Its guard is the gap before it; the
// guard after it is that of the next allocation, or the last chunks of the area.
DevicePointer DiscoveryPool::place(std::size_t n_bytes) {
  const std::size_t guard_chunks = round_up(kGuardBytes, chunk_bytes_) / chunk_bytes_;
  const bool is_first = area_ == 0 && n_chunks_used_ == 0;
  const std::size_t gap = guard_chunks + random() % (is_first ? kFirstChunks : kGapChunks);
  const std::size_t skew_bytes = random() % (chunk_bytes_ / kSkewUnitBytes) * kSkewUnitBytes;
  const std::size_t unit = unit_bytes(n_bytes);
  const std::size_t n_chunks = std::max(unit, round_up(skew_bytes + n_bytes, unit)) / chunk_bytes_;
  while (area_ < areas_.size() &&
         n_chunks_used_ + gap + n_chunks + guard_chunks > areas_[area_].mapped.size()) {
    ++area_;
    n_chunks_used_ = 0;
  }
  if (area_ == areas_.size()) {
    const std::size_t wanted = (gap + n_chunks + guard_chunks) * chunk_bytes_;
    const std::size_t area_bytes = round_up(std::max(wanted, kAreaBytes), chunk_bytes_);
    areas_.push_back(
        {AddressRange(driver_, area_bytes), std::vector<bool>(area_bytes / chunk_bytes_)});
  }
  Area& area = areas_[area_];
  const DevicePointer begin = area.range.address() + (n_chunks_used_ + gap) * chunk_bytes_;
  show_chunks(area, begin, n_chunks * chunk_bytes_, unit);
  n_chunks_used_ += gap + n_chunks;
  return begin + skew_bytes;
}

// The size of the chunks that an allocation shows.
std::size_t DiscoveryPool::unit_bytes(std::size_t n_bytes) const {
  constexpr std::size_t kLeastPart = 4;
  if (!large_chunk_ || n_bytes < large_chunk_->size_bytes() / kLeastPart) return chunk_bytes_;
  return large_chunk_->size_bytes();
}

// After a rewind some chunks are already mapped; the rest then shows small chunks.
void DiscoveryPool::show_chunks(Area& area, DevicePointer begin, std::size_t n_bytes,
                                std::size_t unit_bytes) {
  const auto first = area.mapped.begin() +
                     static_cast<std::ptrdiff_t>((begin - area.range.address()) / chunk_bytes_);
  const auto n_in_unit = static_cast<std::ptrdiff_t>(unit_bytes / chunk_bytes_);
  DevicePointer new_begin = begin;  // mapped since then and not accessible yet
  DevicePointer new_end = begin;
  const auto allow = [&] {
    if (new_end == new_begin) return;
    area.range.allow_access(new_begin, new_end - new_begin, context_.device());
  };
  const auto show_new = [&](DevicePointer at, const PhysicalMemory& chunk) {
    if (at != new_end) {
      allow();
      new_begin = at;
    }
    show(area, at, chunk);
    new_end = at + chunk.size_bytes();
  };
  for (std::size_t offset = 0; offset < n_bytes; offset += unit_bytes) {
    const auto in_unit = first + static_cast<std::ptrdiff_t>(offset / chunk_bytes_);
    const auto unit_end = in_unit + n_in_unit;
    if (unit_bytes > chunk_bytes_ && std::find(in_unit, unit_end, true) == unit_end) {
      show_new(begin + offset, *large_chunk_);
      continue;
    }
    for (std::ptrdiff_t index = 0; index < n_in_unit; ++index) {
      if (in_unit[index]) continue;
      show_new(begin + offset + static_cast<std::size_t>(index) * chunk_bytes_, chunk_);
    }
  }
  allow();
}

void DiscoveryPool::show(Area& area, DevicePointer at, const PhysicalMemory& chunk) {
  area.range.map(at, chunk);
  const auto first =
      area.mapped.begin() + static_cast<std::ptrdiff_t>((at - area.range.address()) / chunk_bytes_);
  std::fill_n(first, chunk.size_bytes() / chunk_bytes_, true);
  const auto is_known = [&](const auto& one) { return one.second == chunk.size_bytes(); };
  if (std::none_of(shown_.begin(), shown_.end(), is_known)) {
    shown_.emplace_back(at, chunk.size_bytes());
  }
}

std::vector<std::pair<DevicePointer, std::size_t>> DiscoveryPool::shown() const {
  const std::lock_guard lock(mutex_);
  return shown_;
}

void DiscoveryPool::fix(std::size_t number, DevicePointer address) {
  const std::lock_guard lock(mutex_);
  fixed_[number] = address;
}

void DiscoveryPool::free(DevicePointer address) {
  const std::lock_guard lock(mutex_);
  const auto allocated = std::find_if(events_.rbegin(), events_.rend(), [&](const PoolEvent& one) {
    return one.is_allocation && one.address == address;
  });
  if (allocated == events_.rend()) return;
  const std::size_t size_bytes = allocated->size_bytes;
  events_.push_back({false, address, size_bytes});
}

std::vector<PoolEvent> DiscoveryPool::events(std::size_t begin) const {
  const std::lock_guard lock(mutex_);
  const std::size_t first = std::min(begin, events_.size());
  return {events_.begin() + static_cast<std::ptrdiff_t>(first), events_.end()};
}

std::size_t DiscoveryPool::n_events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

void DiscoveryPool::rewind() {
  const std::lock_guard lock(mutex_);
  random_state_ = seed_;
  area_ = 0;
  n_chunks_used_ = 0;
  events_.clear();
  n_allocated_ = 0;
  error_.reset();
}

std::optional<std::string> DiscoveryPool::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void DiscoveryPool::note_error(const std::string& message) {
  const std::lock_guard lock(mutex_);
  error_ = message;
}

void DiscoveryPool::set_current(std::shared_ptr<DiscoveryPool> pool) {
  Current& current = the_current();
  {
    const std::lock_guard lock(current.mutex);
    current.pool.swap(pool);
  }
  // The former pool is released here, without the lock.
}

std::shared_ptr<DiscoveryPool> DiscoveryPool::current() {
  const std::lock_guard lock(the_current().mutex);
  return the_current().pool;
}

}  // namespace offload::cuda

using offload::cuda::DiscoveryPool;

void* offload_cuda_pool_malloc(std::ptrdiff_t size_bytes, int, void*) {
  const std::shared_ptr<DiscoveryPool> pool = DiscoveryPool::current();
  if (!pool) return nullptr;
  try {
    return reinterpret_cast<void*>(pool->allocate(static_cast<std::size_t>(size_bytes)));
  } catch (const std::exception& error) {
    pool->note_error(error.what());
    return nullptr;
  }
}

void offload_cuda_pool_free(void* address, std::ptrdiff_t, int, void*) {
  const std::shared_ptr<DiscoveryPool> pool = DiscoveryPool::current();
  if (pool) pool->free(reinterpret_cast<offload::cuda::DevicePointer>(address));
}
