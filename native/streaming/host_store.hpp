// Bytes of files in host memory from which a device copies, held once for all executables that need
// them.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "offload/thread_owner.hpp"
#include "streaming/host_memory.hpp"
#include "streaming/weight_source.hpp"

namespace offload {

// The device that may use memory: what one device of one driver has registered serves its copies
// only.
struct StoreDevice {
  const void* driver = nullptr;
  int index = 0;
};

// Identifies bytes: their file, and the device.
struct StoreKey {
  StoreDevice device;
  FileIdentity file;

  bool operator<(const StoreKey& other) const;
};

class HostStore;

// A range of a file in host memory, or other bytes that belong to one executable. It is read in
// steps, each by the first user that needs it.
//
// Owner: the runs of executables, the last of which releases it with its device's context current.
// Thread: any. Errors: those of `read`.
class HostSlab {
 public:
  // Reads bytes of the slab from an offset in it.
  using Read = std::function<void(std::size_t offset_bytes, std::byte* to, std::size_t n_bytes)>;

  static constexpr std::size_t kStepBytes = std::size_t{8} << 20;

  HostSlab(std::unique_ptr<HostMemory> memory, std::size_t size_bytes);
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;

  std::byte* data() const { return memory_->data(); }
  std::size_t size_bytes() const { return size_bytes_; }

  // Reads the step that holds the byte at `begin` unless it was read; returns how many bytes up to
  // `end` are then present. If `read` throws, the next caller reads the step.
  std::size_t fill(std::size_t begin, std::size_t end, const Read& read);

  // Like fill, but a step that was read is read again, into `again`, and compared. Returns 0 if it
  // differs.
  std::size_t fill_or_compare(std::size_t begin, std::size_t end, ReadBuffer& again,
                              const Read& read);

  // Marks all steps as read; called by an exclusive user that has written all bytes.
  void note_filled();

 private:
  friend class HostStore;

  std::size_t end_of_step(std::size_t begin) const;

  std::unique_ptr<HostMemory> memory_;
  std::size_t size_bytes_;
  std::mutex mutex_;          // guards the following, and reading
  std::vector<bool> filled_;  // by step

  // Owned by the store: where it is listed, so that others find it.
  std::optional<StoreKey> key_;
  std::size_t file_offset_bytes_ = 0;
};

// Bytes of a slab from which an executable copies.
struct HostRun {
  std::shared_ptr<HostSlab> slab;
  std::size_t offset_bytes = 0;  // in the slab
  std::size_t size_bytes = 0;

  std::byte* data() const { return slab->data() + offset_bytes; }
};

// The slabs of a process, listed by their content. Listed slabs never overlap.
//
// A slab lives until its last user releases it. An executable that needs more of a file than exists
// takes new slabs for the rest alone. What is held is therefore what executables needed when they
// were loaded, once, each slab rounded up to pages. A slab of which its remaining users need a part
// stays whole, since registered memory cannot be released in parts.
//
// Owner: the process, never destroyed. Thread: any. Calls are made with the device's context
// current, since they may allocate or release memory.
class HostStore final : public ThreadOwner {
 public:
  // Makes memory of `n_bytes`; its exceptions propagate.
  using Make = std::function<std::unique_ptr<HostMemory>(std::size_t n_bytes)>;

  // The caller must not hold the GIL.
  static HostStore& of_process();

  // Runs that make up a range of a file, in order, of listed slabs and of new ones that are then
  // listed. The caller fills them.
  std::vector<HostRun> take(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes,
                            const Make& make);

  // A slab that is not listed.
  std::shared_ptr<HostSlab> take_private(std::size_t size_bytes, const Make& make);

  // A range of a file in a single listed slab; without a slab if there is none.
  HostRun find(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes);

  // Bytes of a range of a file that are listed and used. The only call that needs no context.
  std::size_t held_bytes(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes);

  // Removes a slab from the listing: its file has other content.
  void delist(HostSlab& slab);

  // If no slab of these runs has another user, delists them all and returns -1: the caller may
  // overwrite them. Otherwise delists none and returns the position of a run that others use.
  std::ptrdiff_t claim(const std::vector<const HostRun*>& runs);

  // Lists a slab by its content, unless a listed slab has or overlaps it.
  void list(const std::shared_ptr<HostSlab>& slab, const StoreKey& key, std::size_t offset_bytes);

  void hold() noexcept override { mutex_.lock(); }
  void release() noexcept override { mutex_.unlock(); }
  void restart() noexcept override;
  void end() noexcept override {}

 private:
  struct Listed {
    std::size_t size_bytes;
    const HostSlab* slab;
    std::weak_ptr<HostSlab> use;
  };
  using Listing = std::map<std::size_t, Listed>;  // by offset in the file

  HostStore() = default;
  ~HostStore() = default;

  // All with the mutex held.
  std::shared_ptr<HostSlab> make_slab(std::size_t size_bytes, const Make& make);
  void add(const std::shared_ptr<HostSlab>& slab, const StoreKey& key, std::size_t offset_bytes);
  void remove(HostSlab& slab);
  std::vector<HostRun> listed_in(const StoreKey& key, std::size_t begin, std::size_t end);

  void destroy(HostSlab* slab);

  std::mutex mutex_;
  std::map<StoreKey, Listing> listings_;
};

}  // namespace offload
