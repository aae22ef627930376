// What one executable has in the host store.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "streaming/host_store.hpp"
#include "streaming/stream_plan.hpp"
#include "streaming/weight_content.hpp"

namespace offload {

// How a device keeps and reads its part of the host store.
struct StoreUse {
  StoreDevice device;
  HostStore::Make make;      // memory that the device copies from
  bool is_shared = true;     // with other executables that need the same bytes of a file
  bool copies_move = false;  // copies that an executable holds can be given another source
};

// The streamed pieces of the weights of one executable, each in one or more runs of slabs. Bytes of
// a file are taken from what other executables have of the same file, and never overwritten while
// they do: new content then goes to memory of this executable's own (copy on write), where copies
// move; else it is refused.
//
// Owner: one stream of weights. Thread: read as the resident is called, at rest: nothing of this
// executable copies; the rest from any. With the device's context, but for claim and the counts.
// Errors: the constructor throws what making memory throws, and leaves nothing behind; the methods
// say theirs.
class StoredWeights {
 public:
  // Memory for all streamed pieces; nothing is read. `plan` and `content` live longer.
  StoredWeights(const StreamPlan& plan, const WeightContent& content, StoreUse use);

  // Of a piece, in order; none: it is resident.
  const std::vector<HostRun>& runs(std::size_t weight, std::size_t piece) const {
    return runs_[weight][piece];
  }
  bool is_streamed(std::size_t weight) const;

  // Brings the content of a streamed piece. `is_first`: what others have read of the same file is
  // taken as it is; else all is read again, and where it differs from what others have, the piece
  // gets memory of its own. `done` gets the bytes that were brought. Throws FileError;
  // ExecutionError where there is no memory, or where the piece cannot get other memory.
  void read(std::size_t weight, std::size_t piece, bool is_first, ReadBuffer& buffer,
            const std::function<void(std::size_t)>& done);

  // These weights get other content at the next read. Where copies do not move, throws
  // ExecutionError for one whose bytes others use too; what follows keeps others from them.
  void claim(const std::vector<std::size_t>& weights);

  // Whether some runs have other memory than copies may still name. As read.
  bool has_moved() const noexcept { return !moved_.empty(); }

  // The executable's copies read where `runs` says: lets go of what they read before.
  void forget_moved() noexcept;

  // Lets go of all. Nothing may copy any more.
  void release() noexcept;

  // Bytes of the streamed pieces, and those of them that other executables use too.
  std::size_t size_bytes() const;
  std::size_t shared_bytes() const;

 private:
  struct Reading {
    WeightSource& source;
    std::size_t offset_bytes;  // in the weight
    bool is_first;
    ReadBuffer& buffer;
    const std::function<void(std::size_t)>& done;
  };

  void take(std::size_t weight, std::size_t piece);
  void renew(HostRun& run, std::size_t weight, const Reading& reading);
  bool bring_listed(HostRun& run, const FilePlace& place, const Reading& reading);
  HostRun own_memory(const HostRun& run, std::size_t weight);
  void use(HostRun& run, HostRun found);
  StoreKey key_of(const FilePlace& place) const { return {use_.device, place.file->identity()}; }

  const StreamPlan& plan_;
  const WeightContent& content_;
  const StoreUse use_;
  HostStore& store_;
  mutable std::mutex mutex_;  // of what follows; read alone changes it, and release
  std::vector<std::vector<std::vector<HostRun>>> runs_;  // by weight and piece
  std::vector<std::shared_ptr<HostSlab>> moved_;         // that copies may still name
};

}  // namespace offload
