// Storages that executions in flight read and write, which torch refuses to resize meanwhile.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace offload {

// One storage and the number of its holders. A reference alone keeps the object but not its memory,
// which `resize_` frees.
//
// Owner: shared by all that may hold the storage; each storage has one. Thread: any.
class StoragePin {
 public:
  // The pin of a storage.
  static std::shared_ptr<StoragePin> of(const c10::Storage& storage);

  ~StoragePin();
  StoragePin(const StoragePin&) = delete;
  StoragePin& operator=(const StoragePin&) = delete;

 private:
  friend class HeldStorages;

  explicit StoragePin(c10::Storage storage) : storage_(std::move(storage)) {}

  c10::Storage storage_;
  // Guarded by the mutex of all pins.
  std::size_t n_executions_ = 0;  // that hold it; next, holders for longer
  std::size_t n_lasting_ = 0;
  bool was_resizable_ = false;  // before the first holder
};

// Kinds of holders: an execution ends in a fork's child, which has no thread for it.
enum class Holder : std::uint8_t { kExecution, kLasting };

using StoragePins = std::vector<std::shared_ptr<StoragePin>>;

// While it lives its storages are not resizable: in the caller's thread torch raises instead of
// freeing memory. Storages that never were resizable remain so.
//
// Owner: an execution, or a source of weights. Thread: any; nothing needs the GIL. Releasing the
// last reference to a storage may take the GIL; no lock is held then.
class HeldStorages {
 public:
  // `shared`: pins with many holders, made once; may be null.
  HeldStorages(Holder holder, std::shared_ptr<const StoragePins> shared, StoragePins own);
  ~HeldStorages();
  HeldStorages(const HeldStorages&) = delete;
  HeldStorages& operator=(const HeldStorages&) = delete;

 private:
  static void end_executions();  // in the child of a fork
  static const int kForksWatched;

  void hold(StoragePin& pin) const;
  void let_go(StoragePin& pin) const;

  Holder holder_;
  std::uint64_t n_forks_ = 0;  // before it was made
  std::shared_ptr<const StoragePins> shared_;
  StoragePins own_;
};

}  // namespace offload
