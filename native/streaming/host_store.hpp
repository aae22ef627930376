// Bytes of files in host memory that a device copies from: once, for all executables that need
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

// Whose memory it is: what one device of one driver has registered is for its copies alone.
struct StoreDevice {
  const void* driver = nullptr;
  int index = 0;
};

// Where bytes lie: in which file, for which device.
struct StoreKey {
  StoreDevice device;
  FileIdentity file;

  bool operator<(const StoreKey& other) const;
};

class HostStore;

// A range of a file in host memory, or other bytes of an executable's own. Read step by step, by
// whoever comes first.
//
// Owner: the runs of executables, the last of which gives it back with its device's context
// current. Thread: any. Errors: those of `read`.
class HostSlab {
 public:
  // Gives bytes of the slab, from an offset in it.
  using Read = std::function<void(std::size_t offset_bytes, std::byte* to, std::size_t n_bytes)>;

  static constexpr std::size_t kStepBytes = std::size_t{8} << 20;

  HostSlab(std::unique_ptr<HostMemory> memory, std::size_t size_bytes);
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;

  std::byte* data() const { return memory_->data(); }
  std::size_t size_bytes() const { return size_bytes_; }

  // Reads the step that holds the byte at `begin`, unless somebody has; gives how many bytes up to
  // `end` are there then. What `read` throws leaves the step to the next one that comes.
  std::size_t fill(std::size_t begin, std::size_t end, const Read& read);

  // As fill; what has been read before is read again, into `again`, and compared. Gives 0 where it
  // is not the same.
  std::size_t fill_or_compare(std::size_t begin, std::size_t end, ReadBuffer& again,
                              const Read& read);

  // Nothing is left to be read: whoever has it alone has written it.
  void note_filled();

 private:
  friend class HostStore;

  std::size_t end_of_step(std::size_t begin) const;

  std::unique_ptr<HostMemory> memory_;
  std::size_t size_bytes_;
  std::mutex mutex_;          // of what follows, and of reading
  std::vector<bool> filled_;  // by step

  // Of the store: where it is listed, so that others find it.
  std::optional<StoreKey> key_;
  std::size_t file_offset_bytes_ = 0;
};

// Bytes of a slab that an executable copies from.
struct HostRun {
  std::shared_ptr<HostSlab> slab;
  std::size_t offset_bytes = 0;  // in the slab
  std::size_t size_bytes = 0;

  std::byte* data() const { return slab->data() + offset_bytes; }
};

// The slabs of a process, listed by what they hold. Listed ones never overlap.
//
// A slab lives until its last user lets go of it. An executable that needs more of a file than is
// there takes new slabs for the rest alone, so what is held is what executables needed when they
// were loaded, once, each slab rounded up to pages; a slab of which its remaining users need a part
// stays as a whole, since registered memory cannot be given back in parts.
//
// Owner: the process, never destroyed. Thread: any. Calls are made with the device's context
// current, since they may make memory or let go of it.
class HostStore final : public ThreadOwner {
 public:
  // Makes memory of so many bytes; what it throws goes through.
  using Make = std::function<std::unique_ptr<HostMemory>(std::size_t n_bytes)>;

  // The caller must not hold the GIL.
  static HostStore& of_process();

  // Runs that make up a range of a file, in order: of listed slabs, and of new ones that are listed
  // then. Whoever takes them fills them.
  std::vector<HostRun> take(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes,
                            const Make& make);

  // One that nobody finds.
  std::shared_ptr<HostSlab> take_private(std::size_t size_bytes, const Make& make);

  // All of a range of a file in one listed slab; without a slab where there is none.
  HostRun find(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes);

  // How many bytes of a range of a file are listed and used. Needs no context, unlike all else.
  std::size_t held_bytes(const StoreKey& key, std::size_t offset_bytes, std::size_t size_bytes);

  // Lets nobody find a slab any more: its file has another content.
  void delist(HostSlab& slab);

  // If none of these runs' slabs has another user, delists them all, and gives -1: whoever has them
  // may overwrite them. Else delists none and gives the position of one that is used by others.
  std::ptrdiff_t claim(const std::vector<const HostRun*>& runs);

  // Lets others find a slab by what it holds, unless that is listed or overlaps what is.
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
