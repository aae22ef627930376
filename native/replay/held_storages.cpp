#include "replay/held_storages.hpp"

#include <pthread.h>

#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace offload {
namespace {

struct Pins {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<StoragePin>> by_storage;
};

Pins& pins() {
  static auto* const instance = new Pins;  // never destroyed: executions may outlive statics
  return *instance;
}

// In the child of a fork work is abandoned by lanes, and lets go of what it held: so that the mutex
// is usable there by then, this stands before what watches forks for lanes.
const int kForksWatched = pthread_atfork([] { pins().mutex.lock(); }, [] { pins().mutex.unlock(); },
                                         [] { new (&pins().mutex) std::mutex(); });

}  // namespace

std::shared_ptr<StoragePin> StoragePin::of(const c10::Storage& storage) {
  static_cast<void>(kForksWatched);
  std::shared_ptr<StoragePin> pin;  // outlives the lock
  const std::lock_guard lock(pins().mutex);
  std::weak_ptr<StoragePin>& known = pins().by_storage[storage.unsafeGetStorageImpl()];
  pin = known.lock();
  if (!pin) {
    pin.reset(new StoragePin(storage));
    known = pin;
  }
  return pin;
}

// Another pin of the storage may have been made between the last reference's end and now.
StoragePin::~StoragePin() {
  const std::lock_guard lock(pins().mutex);
  const auto found = pins().by_storage.find(storage_.unsafeGetStorageImpl());
  if (found != pins().by_storage.end() && found->second.expired()) pins().by_storage.erase(found);
}

HeldStorages::HeldStorages(std::shared_ptr<const StoragePins> shared, StoragePins own)
    : shared_(std::move(shared)), own_(std::move(own)) {
  const auto hold = [](StoragePin& pin) {
    if (pin.n_holders_++ > 0) return;
    c10::StorageImpl* const storage = pin.storage_.unsafeGetStorageImpl();
    pin.was_resizable_ = storage->resizable();
    if (pin.was_resizable_) storage->set_resizable(false);
  };
  const std::lock_guard lock(pins().mutex);
  if (shared_) {
    for (const auto& pin : *shared_) hold(*pin);
  }
  for (const auto& pin : own_) hold(*pin);
}

HeldStorages::~HeldStorages() {
  // Meanwhile its memory may have been moved to where nothing resizes it (`share_memory_`).
  const auto let_go = [](StoragePin& pin) {
    if (--pin.n_holders_ > 0 || !pin.was_resizable_) return;
    c10::StorageImpl* const storage = pin.storage_.unsafeGetStorageImpl();
    if (storage->allocator() != nullptr) storage->set_resizable(true);
  };
  const std::lock_guard lock(pins().mutex);
  if (shared_) {
    for (const auto& pin : *shared_) let_go(*pin);
  }
  for (const auto& pin : own_) let_go(*pin);
}

}  // namespace offload
