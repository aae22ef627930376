#include "ascend/random_cells.hpp"

#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {

RandomCells::RandomCells(const Runtime& runtime, std::vector<RandomCell> cells)
    : copies_(runtime), cells_(std::move(cells)), seeds_(cells_.size()) {}

void RandomCells::write(const std::vector<std::uint64_t>& seeds_and_offsets, Stream stream) {
  if (seeds_and_offsets.size() != 2 * cells_.size()) {
    throw ExecutionError("expected seed and offset of " + std::to_string(cells_.size()) +
                         " generators, got " + std::to_string(seeds_and_offsets.size()) +
                         " numbers");
  }
  const std::size_t n_known = std::exchange(known_seeds_, 0);  // 0, should a copy fail
  const auto write_number = [&](std::uint64_t address, const std::uint64_t& number) {
    copies_.copy(reinterpret_cast<void*>(address), &number, sizeof number, stream,
                 "writing the state of a generator");
  };
  for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
    const std::uint64_t seed = seeds_and_offsets[2 * cell];
    if (cell >= n_known || seeds_[cell] != seed) write_number(cells_[cell].seed, seed);
    seeds_[cell] = seed;
    write_number(cells_[cell].offset, seeds_and_offsets[2 * cell + 1]);
  }
  known_seeds_ = cells_.size();
}

}  // namespace offload::acl
