// The memory that weights have under a budget.
#pragma once

#include <cstddef>
#include <vector>

#include "streaming/stream_plan.hpp"

namespace offload {

// One range of memory of exactly the plan's size, pages rounded up. A weight in one piece lies in
// it; a weight in several has an address range of its own in which its pieces are mapped side by
// side, so that two weights may show the same bytes. Only then is the memory a file without a name
// (memfd), which a fork does not copy.
//
// Owner: one stream. Thread: any may read addresses; callers serialise separate. Errors: the
// constructor and separate throw OutOfMemory where the system gives no memory or addresses, and
// leave nothing behind.
class WeightMemory {
 public:
  // `plan` has passed check_plan.
  explicit WeightMemory(const StreamPlan& plan);
  ~WeightMemory();
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  // Where a weight begins; null for one that is gathered.
  std::byte* address(std::size_t weight) const noexcept { return addresses_[weight]; }

  // Whether a child of a fork has the same bytes as its parent, not a copy of them.
  bool is_shared() const noexcept { return file_ >= 0; }

  // In the child of a fork: puts memory of its own at the same addresses, with no content. If it
  // throws, the addresses may show memory of either.
  void separate();

  // Gives back the whole pages in which only weights lie that are `discarded`: they hold zeros
  // until they are written. Gives how many bytes that are, also of pages that were given back
  // before; none of memory that is shared with a fork.
  std::size_t discard(const StreamPlan& plan, const std::vector<bool>& discarded);

  // Gives the memory back but for its addresses, which hold zeros from then on. Not between a fork
  // and separate.
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
