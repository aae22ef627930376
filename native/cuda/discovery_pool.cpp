#include "cuda/discovery_pool.hpp"

#include <algorithm>
#include <exception>

namespace offload::cuda {
namespace {

constexpr std::size_t kAreaBytes = std::size_t{64} << 30;  // of addresses, which cost nothing
constexpr std::size_t kSkewUnitBytes = 512;                // torch's kMinBlockSize
constexpr std::size_t kGuardBytes = std::size_t{1} << 20;
constexpr std::uint64_t kFirstChunks = 1024;  // the first allocation lies up to so many chunks in
constexpr std::uint64_t kGapChunks = 16;      // and the next ones so many apart

struct Current {
  std::mutex mutex;
  std::shared_ptr<DiscoveryPool> pool;
};

Current& the_current() {
  static auto* const instance = new Current;  // never destroyed: torch may free at exit
  return *instance;
}

}  // namespace

DiscoveryPool::DiscoveryPool(int device, std::uint64_t seed)
    : driver_(Driver::get()),
      context_(driver_, device),
      chunk_bytes_(granularity_bytes(driver_, context_.device())),
      chunk_(driver_, context_.device(), chunk_bytes_),
      seed_(seed),
      random_state_(seed) {}

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
  const DevicePointer address = place(size_bytes);
  events_.push_back({true, address, size_bytes});
  return address;
}

// Where the next allocation lies, with the chunk shown there. Its guard is the gap before it; the
// one behind is the next one's, or the last chunks of the area.
DevicePointer DiscoveryPool::place(std::size_t n_bytes) {
  const std::size_t guard_chunks = round_up(kGuardBytes, chunk_bytes_) / chunk_bytes_;
  const bool is_first = area_ == 0 && n_chunks_used_ == 0;
  const std::size_t gap = guard_chunks + random() % (is_first ? kFirstChunks : kGapChunks);
  const std::size_t skew_bytes = random() % (chunk_bytes_ / kSkewUnitBytes) * kSkewUnitBytes;
  const std::size_t n_chunks =
      std::max<std::size_t>(1, round_up(skew_bytes + n_bytes, chunk_bytes_) / chunk_bytes_);
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
  show_chunk(area, begin, n_chunks * chunk_bytes_);
  n_chunks_used_ += gap + n_chunks;
  return begin + skew_bytes;
}

void DiscoveryPool::show_chunk(Area& area, DevicePointer begin, std::size_t n_bytes) {
  bool is_new = false;
  for (std::size_t offset = 0; offset < n_bytes; offset += chunk_bytes_) {
    const std::size_t index = (begin + offset - area.range.address()) / chunk_bytes_;
    if (area.mapped[index]) continue;
    area.range.map(begin + offset, chunk_);
    area.mapped[index] = true;
    is_new = true;
  }
  if (is_new) area.range.allow_access(begin, n_bytes, context_.device());
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
  // The one that was current is let go here, without the lock.
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
