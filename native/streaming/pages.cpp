#include "streaming/pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>

namespace offload {
namespace {

// On x86-64, and on arm64 with small pages; elsewhere this only gains less.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

}  // namespace

std::size_t whole_pages(std::size_t size_bytes) noexcept {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

std::byte* map_pages(std::size_t size_bytes) noexcept {
  const std::size_t kept_bytes = whole_pages(size_bytes);
  if (kept_bytes > std::numeric_limits<std::size_t>::max() - kHugePageBytes) {
    errno = ENOMEM;
    return nullptr;
  }
  const std::size_t all_bytes = kept_bytes + kHugePageBytes;
  void* const all =
      mmap(nullptr, all_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(all);
  const std::size_t misplaced_bytes = reinterpret_cast<std::uintptr_t>(all) % kHugePageBytes;
  const std::size_t before_bytes = misplaced_bytes == 0 ? 0 : kHugePageBytes - misplaced_bytes;
  if (before_bytes > 0) munmap(begin, before_bytes);
  const std::size_t after_bytes = kHugePageBytes - before_bytes;
  if (after_bytes > 0) munmap(begin + before_bytes + kept_bytes, after_bytes);
  madvise(begin + before_bytes, kept_bytes, MADV_HUGEPAGE);  // where refused, small pages serve
  return begin + before_bytes;
}

}  // namespace offload
