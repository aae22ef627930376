// Where a captured model's random kernels read the state of generators.
#pragma once

#include <cstdint>
#include <vector>

#include "ascend/host_copies.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// Addresses on the device of a generator's seed and of its offset, eight bytes each.
struct RandomCell {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

// Writes cells before the model that reads them. A seed that lies there already is not written
// again.
//
// Owner: one captured model. Thread: callers serialise, with the device's context current. Errors:
// write throws ExecutionError; after one that failed, the next writes all.
class RandomCells {
 public:
  RandomCells(const Runtime& runtime, std::vector<RandomCell> cells);

  // Enqueues seed and offset of each cell, in their order. Throws ExecutionError also for another
  // number of them.
  void write(const std::vector<std::uint64_t>& seeds_and_offsets, Stream stream);

  // What was enqueued may have failed on the device: the next write writes all.
  void distrust() noexcept { known_seeds_ = 0; }

 private:
  HostCopies copies_;
  std::vector<RandomCell> cells_;
  std::vector<std::uint64_t> seeds_;  // as last written
  std::size_t known_seeds_ = 0;       // how many of them, from the first, lie on the device
};

}  // namespace offload::acl
