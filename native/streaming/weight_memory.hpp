// The memory of weights under a budget.
#pragma once

#include <cstddef>
#include <vector>

#include "streaming/stream_plan.hpp"

namespace offload {

// One memory range of exactly the plan's size, rounded up to pages. A weight in one piece lies in
// it. A weight in several pieces has a separate address range in which its pieces are mapped side
// by side, so that two weights may show the same bytes. Only then is the memory an unnamed file
// (memfd), which a fork does not copy.
//
// Owner: one stream. Thread: any may read addresses; callers serialise separate. Errors: the
// constructor and separate throw OutOfMemory if the system gives no memory or addresses, and leave
// nothing behind.
class WeightMemory {
 public:
  // `plan` has passed check_plan.
  explicit WeightMemory(const StreamPlan& plan);
  ~WeightMemory();
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  // The address of a weight; null if it is gathered.
  std::byte* address(std::size_t weight) const noexcept { return addresses_[weight]; }

  // Whether a forked child shares the bytes of its parent instead of copying them.
  bool is_shared() const noexcept { return file_ >= 0; }

  // In the child of a fork: maps new memory at the same addresses, without content. If it throws,
  // the addresses may show memory of either process.
  void separate();

  // Discards the whole pages that hold only `discarded` weights: they read as zeros until they are
  // written. Returns the number of such bytes, including pages discarded before; 0 for memory that
  // is shared with a fork.
  std::size_t discard(const StreamPlan& plan, const std::vector<bool>& discarded);

  // Releases the memory but keeps its addresses, which read as zeros from then on. Not between a
  // fork and separate.
  void give_back() noexcept;

 private:
  struct Mapping {
    std::byte* address;
    std::size_t size_bytes;  // whole pages
    std::size_t memory_offset_bytes;
  };

  void map_all(const StreamPlan& plan);
  void release() noexcept;

  int file_ = -1;
  std::size_t size_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::vector<Mapping> ranges_;    // reserved, of weights in several pieces
  std::vector<Mapping> mappings_;  // of the file: all of it, and pieces
  std::vector<std::byte*> addresses_;
};

}  // namespace offload
