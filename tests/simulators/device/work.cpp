#include "work.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace simulator {
namespace {

std::size_t alignment_of(std::size_t n_bytes) {
  constexpr std::size_t kLargest = 8;
  return n_bytes == 0 ? 1 : std::min(kLargest, n_bytes & (~n_bytes + 1));
}

}  // namespace

void lay_out(Kernel& kernel, const std::size_t* sizes, std::size_t count) {
  std::size_t end = 0;
  for (std::size_t index = 0; index < count; ++index) {
    const std::size_t alignment = alignment_of(sizes[index]);
    const std::size_t offset = (end + alignment - 1) / alignment * alignment;
    kernel.parameters.push_back({offset, sizes[index]});
    end = offset + sizes[index];
  }
  kernel.packed_bytes = end;
}

std::size_t span_bytes(const Operand& operand, const Copy& copy) {
  if (copy.width_bytes == 0 || copy.height == 0 || copy.depth == 0) return 0;
  const std::uint64_t last = operand.at(copy.height - 1, copy.depth - 1) + copy.width_bytes;
  return last - operand.at(0, 0);
}

std::size_t span_bytes(const Fill& fill) {
  if (fill.width == 0 || fill.height == 0) return 0;
  return (fill.height - 1) * fill.pitch_bytes + fill.width * fill.element_bytes;
}

void run(const Copy& copy) {
  const unsigned char* staged = copy.staged.empty() ? nullptr : copy.staged.data();
  for (std::size_t plane = 0; plane < copy.depth; ++plane) {
    for (std::size_t line = 0; line < copy.height; ++line) {
      const void* source = reinterpret_cast<const void*>(copy.source.at(line, plane));
      if (staged != nullptr) source = std::exchange(staged, staged + copy.width_bytes);
      std::memmove(reinterpret_cast<void*>(copy.destination.at(line, plane)), source,
                   copy.width_bytes);
    }
  }
}

void run(const Fill& fill) {
  for (std::size_t line = 0; line < fill.height; ++line) {
    auto* at = reinterpret_cast<unsigned char*>(fill.destination + line * fill.pitch_bytes);
    for (std::size_t element = 0; element < fill.width; ++element) {
      std::memcpy(at + element * fill.element_bytes, &fill.value, fill.element_bytes);
    }
  }
}

}  // namespace simulator
