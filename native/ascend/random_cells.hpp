// The device memory from which a captured model's random kernels read generators' states.
#pragma once

#include <cstdint>
#include <vector>

#include "ascend/host_copies.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// Device addresses of a generator's seed and offset, eight bytes each.
struct RandomCell {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

// Writes cells before the model that reads them. An unchanged seed is not written again.
//
// Owner: one captured model. Thread: callers serialise, with the device's context current. Errors:
// write throws ExecutionError; after a failed write, the next writes everything.
class RandomCells {
 public:
  RandomCells(const Runtime& runtime, std::vector<RandomCell> cells);

  // Enqueues seed and offset of each cell, in their order. Also throws ExecutionError for another
  // number of them.
  void write(const std::vector<std::uint64_t>& seeds_and_offsets, Stream stream);

  // Enqueued writes may have failed on the device: the next write writes everything.
  void distrust() noexcept { known_seeds_ = 0; }

 private:
  HostCopies copies_;
  std::vector<RandomCell> cells_;
  std::vector<std::uint64_t> seeds_;  // as last written
  std::size_t known_seeds_ = 0;       // the number of seeds on the device, counted from the first
};

}  // namespace offload::acl
