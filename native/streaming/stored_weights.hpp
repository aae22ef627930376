// The part of the host store that one executable uses.
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

// How a device uses the host store.
struct StoreUse {
  StoreDevice device;
  HostStore::Make make;      // memory from which the device copies
  bool is_shared = true;     // with other executables that need the same bytes of a file
  bool copies_move = false;  // copies of an executable can be given another source
};

// The streamed pieces of an executable's weights, each in one or more runs of slabs. Bytes of a
// file are shared with other executables that have them, and never overwritten while those do: new
// content then goes to memory of this executable alone (copy on write) where copies move; otherwise
// it is refused.
//
// Owner: one stream of weights. Thread: read as the resident is called, at rest (no copy of this
// executable runs); the rest from any. With the device's context, except claim and the counts.
// Errors: the constructor throws what making memory throws, and leaves nothing behind; each method
// states its errors.
class StoredWeights {
 public:
  // Allocates memory for all streamed pieces; reads nothing. `plan` and `content` must outlive it.
  StoredWeights(const StreamPlan& plan, const WeightContent& content, StoreUse use);

  // The runs of a piece, in order; empty if it is resident.
  const std::vector<HostRun>& runs(std::size_t weight, std::size_t piece) const {
    return runs_[weight][piece];
  }
  bool is_streamed(std::size_t weight) const;

  // Reads the content of a streamed piece. `is_first`: bytes that others have read of the same
  // file are used as they are. Otherwise everything is read again, and if it differs from what
  // others have, the piece gets separate memory. `done` receives the number of bytes read.
  // Throws FileError; ExecutionError if there is no memory, or the piece cannot get other memory.
  void read(std::size_t weight, std::size_t piece, bool is_first, ReadBuffer& buffer,
            const std::function<void(std::size_t)>& done);

  // Prepares these weights for other content at the next read. Where copies do not move, throws
  // ExecutionError for a weight whose bytes others use too, and keeps others from using the bytes.
  void claim(const std::vector<std::size_t>& weights);

  // Whether some runs have moved from memory that copies may still refer to. As read.
  bool has_moved() const noexcept { return !moved_.empty(); }

  // Called once the executable's copies read from `runs`: releases their former sources.
  void forget_moved() noexcept;

  // Releases everything. Nothing may copy any more.
  void release() noexcept;

  // Bytes of the streamed pieces, and the part of them that other executables use too.
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
  bool use_listed(HostRun& run, const FilePlace& place, const Reading& reading);
  HostRun own_memory(const HostRun& run, std::size_t weight);
  void use(HostRun& run, HostRun found);
  StoreKey key_of(const FilePlace& place) const { return {use_.device, place.file->identity()}; }

  const StreamPlan& plan_;
  const WeightContent& content_;
  const StoreUse use_;
  HostStore& store_;
  mutable std::mutex mutex_;  // guards the following, which only read and release change
  std::vector<std::vector<std::vector<HostRun>>> runs_;  // by weight and piece
  std::vector<std::shared_ptr<HostSlab>> moved_;         // to which copies may still refer
};

}  // namespace offload
