#include "streaming/host_store.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>
#include <tuple>
#include <utility>

namespace offload {

bool StoreKey::operator<(const StoreKey& other) const {
  const std::less<const void*> is_before;
  if (device.driver != other.device.driver) {
    return is_before(device.driver, other.device.driver);
  }
  return device.index != other.device.index ? device.index < other.device.index : file < other.file;
}

// ---- slabs --------------------------------------------------------------------------------------

HostSlab::HostSlab(std::unique_ptr<HostMemory> memory, std::size_t size_bytes)
    : memory_(std::move(memory)),
      size_bytes_(size_bytes),
      filled_((size_bytes + kStepBytes - 1) / kStepBytes) {}

std::size_t HostSlab::end_of_step(std::size_t begin) const {
  return std::min(size_bytes_, (begin / kStepBytes + 1) * kStepBytes);
}

std::size_t HostSlab::fill(std::size_t begin, std::size_t end, const Read& read) {
  const std::size_t step = begin / kStepBytes;
  const std::lock_guard lock(mutex_);
  if (!filled_[step]) {
    const std::size_t at = step * kStepBytes;
    read(at, data() + at, end_of_step(begin) - at);
    filled_[step] = true;
  }
  return std::min(end, end_of_step(begin)) - begin;
}

std::size_t HostSlab::fill_or_compare(std::size_t begin, std::size_t end, ReadBuffer& again,
                                      const Read& read) {
  const std::size_t n_bytes =
      std::min({end - begin, end_of_step(begin) - begin, ReadBuffer::kSizeBytes});
  {
    const std::lock_guard lock(mutex_);
    if (filled_[begin / kStepBytes]) {
      read(begin, again.memory(), n_bytes);
      return std::memcmp(data() + begin, again.memory(), n_bytes) == 0 ? n_bytes : 0;
    }
  }
  return fill(begin, end, read);
}

void HostSlab::note_filled() {
  const std::lock_guard lock(mutex_);
  filled_.assign(filled_.size(), true);
}

// ---- the store ----------------------------------------------------------------------------------

HostStore& HostStore::of_process() {
  static auto* const instance = [] {
    auto* const made = new HostStore;  // never destroyed: executables may outlive statics
    register_thread_owner(*made);
    return made;
  }();
  return *instance;
}

// A mutex that is held cannot be destroyed.
void HostStore::restart() noexcept { new (&mutex_) std::mutex(); }

std::shared_ptr<HostSlab> HostStore::make_slab(std::size_t size_bytes, const Make& make) {
  auto slab = std::make_unique<HostSlab>(make(size_bytes), size_bytes);
  return {slab.release(), [this](HostSlab* one) { destroy(one); }};
}

void HostStore::destroy(HostSlab* slab) {
  {
    const std::lock_guard lock(mutex_);
    remove(*slab);
  }
  delete slab;
}

void HostStore::add(const std::shared_ptr<HostSlab>& slab, const StoreKey& key,
                    std::size_t offset_bytes) {
  listings_[key].insert_or_assign(offset_bytes, Listed{slab->size_bytes(), slab.get(), slab});
  slab->key_ = key;
  slab->file_offset_bytes_ = offset_bytes;
}

// The listing may already hold another slab in place of one that is about to be destroyed.
void HostStore::remove(HostSlab& slab) {
  if (!slab.key_) return;
  const auto listing = listings_.find(*slab.key_);
  slab.key_.reset();
  if (listing == listings_.end()) return;
  const auto found = listing->second.find(slab.file_offset_bytes_);
  if (found != listing->second.end() && found->second.slab == &slab) listing->second.erase(found);
  if (listing->second.empty()) listings_.erase(listing);
}

// The listed slabs of [begin, end), in order. Removes those that are about to be destroyed.
std::vector<HostRun> HostStore::listed_in(const StoreKey& key, std::size_t begin, std::size_t end) {
  std::vector<HostRun> runs;
  const auto found = listings_.find(key);
  if (found == listings_.end()) return runs;
  Listing& listing = found->second;
  auto one = listing.upper_bound(begin);
  if (one != listing.begin()) --one;
  while (one != listing.end() && one->first < end) {
    const std::size_t first = std::max(begin, one->first);
    const std::size_t last = std::min(end, one->first + one->second.size_bytes);
    if (first >= last) {
      ++one;
      continue;
    }
    std::shared_ptr<HostSlab> slab = one->second.use.lock();
    if (!slab) {
      one = listing.erase(one);
      continue;
    }
    runs.push_back({std::move(slab), first - one->first, last - first});
    ++one;
  }
  if (listing.empty()) listings_.erase(found);
  return runs;
}

// On an error, runs are released after the mutex: this may be a slab's last user.
std::vector<HostRun> HostStore::take(const StoreKey& key, std::size_t offset_bytes,
                                     std::size_t size_bytes, const Make& make) {
  std::vector<HostRun> listed;
  std::vector<HostRun> runs;
  const std::lock_guard lock(mutex_);
  const std::size_t end = offset_bytes + size_bytes;
  listed = listed_in(key, offset_bytes, end);
  std::size_t at = offset_bytes;
  const auto make_up_to = [&](std::size_t next) {
    if (next == at) return;
    runs.push_back({make_slab(next - at, make), 0, next - at});
    add(runs.back().slab, key, at);
    at = next;
  };
  for (HostRun& run : listed) {
    make_up_to(run.slab->file_offset_bytes_ + run.offset_bytes);
    at += run.size_bytes;
    runs.push_back(std::move(run));
  }
  make_up_to(end);
  return runs;
}

std::shared_ptr<HostSlab> HostStore::take_private(std::size_t size_bytes, const Make& make) {
  return make_slab(size_bytes, make);
}

HostRun HostStore::find(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes) {
  std::vector<HostRun> listed;
  const std::lock_guard lock(mutex_);
  listed = listed_in(key, offset_bytes, offset_bytes + size_bytes);
  if (listed.size() != 1 || listed.front().size_bytes != size_bytes) return {};
  return listed.front();
}

std::size_t HostStore::held_bytes(const StoreKey& key, std::size_t offset_bytes,
                                  std::size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = listings_.find(key);
  if (found == listings_.end()) return 0;
  std::size_t n_bytes = 0;
  for (const auto& [begin, one] : found->second) {
    if (one.use.expired()) continue;
    const std::size_t first = std::max(offset_bytes, begin);
    const std::size_t last = std::min(offset_bytes + size_bytes, begin + one.size_bytes);
    if (first < last) n_bytes += last - first;
  }
  return n_bytes;
}

void HostStore::delist(HostSlab& slab) {
  const std::lock_guard lock(mutex_);
  remove(slab);
}

std::ptrdiff_t HostStore::claim(const std::vector<const HostRun*>& runs) {
  const std::lock_guard lock(mutex_);
  for (auto one = runs.begin(); one != runs.end(); ++one) {
    if ((*one)->slab.use_count() > 1) return std::distance(runs.begin(), one);
  }
  for (const HostRun* const one : runs) remove(*one->slab);
  return -1;
}

void HostStore::list(const std::shared_ptr<HostSlab>& slab, const StoreKey& key,
                     std::size_t offset_bytes) {
  std::vector<HostRun> listed;
  const std::lock_guard lock(mutex_);
  remove(*slab);
  listed = listed_in(key, offset_bytes, offset_bytes + slab->size_bytes());
  if (listed.empty()) add(slab, key, offset_bytes);
}

}  // namespace offload
