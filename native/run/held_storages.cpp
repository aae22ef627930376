#include "run/held_storages.hpp"

#include <pthread.h>

#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace offload {
namespace {

struct Pins {
  std::mutex mutex;
  std::unordered_map<c10::StorageImpl*, std::weak_ptr<StoragePin>> by_storage;
  std::uint64_t n_forks = 0;  // this process is the child of
};

Pins& pins() {
  static auto* const instance = new Pins;  // never destroyed: executions may outlive statics
  return *instance;
}

// Its memory may have moved meanwhile to where it cannot be resized (`share_memory_`).
void make_resizable(c10::StorageImpl* storage) {
  if (storage->allocator() != nullptr) storage->set_resizable(true);
}

}  // namespace

// In the child of a fork lanes abandon their work, which releases what it held. The mutex must be
// usable by then, so this handler is registered before that of the lanes.
const int HeldStorages::kForksWatched =
    pthread_atfork([] { pins().mutex.lock(); }, [] { pins().mutex.unlock(); }, end_executions);

// What a lane's thread held is lost, and never released.
void HeldStorages::end_executions() {
  new (&pins().mutex) std::mutex();
  ++pins().n_forks;
  for (const auto& [storage, known] : pins().by_storage) {
    const std::shared_ptr<StoragePin> pin = known.lock();
    if (!pin || pin->n_executions_ == 0) continue;
    pin->n_executions_ = 0;
    if (pin->n_lasting_ == 0 && pin->was_resizable_) make_resizable(storage);
  }
}

std::shared_ptr<StoragePin> StoragePin::of(const c10::Storage& storage) {
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

// Another pin of the storage may have been made since the last reference ended.
StoragePin::~StoragePin() {
  const std::lock_guard lock(pins().mutex);
  const auto found = pins().by_storage.find(storage_.unsafeGetStorageImpl());
  if (found != pins().by_storage.end() && found->second.expired()) pins().by_storage.erase(found);
}

HeldStorages::HeldStorages(Holder holder, std::shared_ptr<const StoragePins> shared,
                           StoragePins own)
    : holder_(holder), shared_(std::move(shared)), own_(std::move(own)) {
  const std::lock_guard lock(pins().mutex);
  n_forks_ = pins().n_forks;
  if (shared_) {
    for (const auto& pin : *shared_) hold(*pin);
  }
  for (const auto& pin : own_) hold(*pin);
}

HeldStorages::~HeldStorages() {
  const std::lock_guard lock(pins().mutex);
  if (holder_ == Holder::kExecution && n_forks_ != pins().n_forks) return;
  if (shared_) {
    for (const auto& pin : *shared_) let_go(*pin);
  }
  for (const auto& pin : own_) let_go(*pin);
}

void HeldStorages::hold(StoragePin& pin) const {
  const bool is_first = pin.n_executions_ + pin.n_lasting_ == 0;
  ++(holder_ == Holder::kExecution ? pin.n_executions_ : pin.n_lasting_);
  if (!is_first) return;
  c10::StorageImpl* const storage = pin.storage_.unsafeGetStorageImpl();
  pin.was_resizable_ = storage->resizable();
  if (pin.was_resizable_) storage->set_resizable(false);
}

void HeldStorages::let_go(StoragePin& pin) const {
  --(holder_ == Holder::kExecution ? pin.n_executions_ : pin.n_lasting_);
  if (pin.n_executions_ + pin.n_lasting_ > 0 || !pin.was_resizable_) return;
  make_resizable(pin.storage_.unsafeGetStorageImpl());
}

}  // namespace offload
