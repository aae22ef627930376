#include "objects.hpp"

#include <cstring>

namespace simulated_ascend {
namespace {

constexpr std::size_t kSlabBytes = std::size_t{1} << 20;
constexpr std::size_t kUnitBytes = 256;

std::size_t whole(std::size_t n_bytes) {
  return (n_bytes + kUnitBytes) / kUnitBytes * kUnitBytes;  // always a little more
}

}  // namespace

std::uint64_t ArgumentPool::allocate(std::size_t n_bytes) {
  const std::size_t size = whole(n_bytes);
  std::uint64_t address = 0;
  const auto again = free_.find(size);
  if (again != free_.end()) {
    address = again->second;
    free_.erase(again);
  } else {
    if (left_bytes_ < size) {
      left_bytes_ = size > kSlabBytes ? size : kSlabBytes;
      slab_ = memory_.allocate(left_bytes_);
      slab_bytes_ += left_bytes_;
    }
    address = slab_;
    slab_ += size;
    left_bytes_ -= size;
  }
  live_[address] = size;
  live_bytes_ += n_bytes;
  ++n_live_;
  return address;
}

void ArgumentPool::free(std::uint64_t address, std::size_t n_bytes) {
  const auto found = live_.find(address);
  if (found == live_.end()) return;  // removed by a reset
  std::memset(reinterpret_cast<void*>(address), simulator::kPoison, found->second);
  free_.emplace(found->second, address);
  live_.erase(found);
  live_bytes_ -= n_bytes;
  --n_live_;
}

void ArgumentPool::reset() {
  free_.clear();
  live_.clear();
  slab_ = 0;
  left_bytes_ = slab_bytes_ = live_bytes_ = n_live_ = 0;
}

ArgumentBlock::ArgumentBlock(ArgumentPool& from, std::size_t n)
    : pool(from), n_bytes(n), address(from.allocate(n)) {}

ArgumentBlock::~ArgumentBlock() { pool.free(address, n_bytes); }

}  // namespace simulated_ascend
