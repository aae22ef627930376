#include "streaming/weight_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload {
namespace {

[[noreturn]] void fail(std::size_t size_bytes, const char* what, int error) {
  const std::string text = "the weights need " + std::to_string(size_bytes) + " bytes of " + what +
                           ", and the system gives none: " + std::strerror(error) +
                           "; give a smaller budget";
  if (error == ENOMEM || error == ENOSPC) throw OutOfMemory(text);
  throw ExecutionError(text);
}

// A memory file of which every page is allocated: touching a missing page would kill the process.
int make_file(std::size_t size_bytes) {
  const int file = memfd_create("offload weights", MFD_CLOEXEC);
  if (file < 0) fail(size_bytes, "memory", errno);
  const int error = posix_fallocate(file, 0, static_cast<off_t>(size_bytes));
  if (error != 0) {
    close(file);
    fail(size_bytes, "memory", error);
  }
  return file;
}

void* map_file(int file, void* at, std::size_t size_bytes, std::size_t offset_bytes) {
  return mmap(at, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at == nullptr ? 0 : MAP_FIXED),
              file, static_cast<off_t>(offset_bytes));
}

}  // namespace

WeightMemory::WeightMemory(const StreamPlan& plan) : size_bytes_(whole_pages(plan.memory_bytes)) {
  try {
    map_all(plan);
  } catch (...) {
    release();
    throw;
  }
}

WeightMemory::~WeightMemory() { release(); }

void WeightMemory::map_all(const StreamPlan& plan) {
  addresses_.assign(plan.weights.size(), nullptr);
  if (size_bytes_ == 0) return;
  const bool mapped = std::any_of(plan.weights.begin(), plan.weights.end(),
                                  [](const auto& weight) { return weight.pieces.size() > 1; });
  if (mapped) file_ = make_file(size_bytes_);
  void* const base = mapped ? map_file(file_, nullptr, size_bytes_, 0) : map_pages(size_bytes_);
  if (base == MAP_FAILED || base == nullptr) fail(size_bytes_, "memory", errno);
  base_ = static_cast<std::byte*>(base);
  if (mapped) mappings_.push_back({base_, size_bytes_, 0});
  for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
    if (plan.weights[weight].gathered) continue;
    const std::vector<WeightPiece>& pieces = plan.weights[weight].pieces;
    if (pieces.size() <= 1) {
      addresses_[weight] = base_ + (pieces.empty() ? 0 : pieces.front().memory_offset_bytes);
      continue;
    }
    const std::size_t range_bytes = whole_pages(plan.weights[weight].size_bytes);
    void* const range =
        mmap(nullptr, range_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) fail(range_bytes, "address space", errno);
    addresses_[weight] = static_cast<std::byte*>(range);
    ranges_.push_back({addresses_[weight], range_bytes, 0});
    for (const WeightPiece& piece : pieces) {
      const Mapping mapping{addresses_[weight] + piece.offset_bytes, whole_pages(piece.size_bytes),
                            piece.memory_offset_bytes};
      if (map_file(file_, mapping.address, mapping.size_bytes, mapping.memory_offset_bytes) ==
          MAP_FAILED) {
        fail(mapping.size_bytes, "address space", errno);
      }
      mappings_.push_back(mapping);
    }
  }
}

void WeightMemory::separate() {
  if (!is_shared()) return;
  const int file = make_file(size_bytes_);
  for (const Mapping& mapping : mappings_) {
    if (map_file(file, mapping.address, mapping.size_bytes, mapping.memory_offset_bytes) ==
        MAP_FAILED) {
      const int error = errno;
      close(file);
      fail(mapping.size_bytes, "address space", error);
    }
  }
  close(file_);
  file_ = file;
}

// Adjacent weights are discarded together: the system takes no part of a huge page back until it is
// short of memory.
std::size_t WeightMemory::discard(const StreamPlan& plan, const std::vector<bool>& discarded) {
  if (base_ == nullptr || is_shared()) return 0;
  std::vector<std::pair<std::size_t, std::size_t>> kept{{size_bytes_, size_bytes_}};
  for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
    if (discarded[weight]) continue;
    for (const WeightPiece& piece : plan.weights[weight].pieces) {
      kept.emplace_back(piece.memory_offset_bytes, piece.memory_offset_bytes + piece.size_bytes);
    }
  }
  std::sort(kept.begin(), kept.end());
  const std::size_t page_bytes = whole_pages(1);
  std::size_t n_bytes = 0;
  std::size_t from = 0;
  for (const auto& [begin, end] : kept) {
    const std::size_t until = begin / page_bytes * page_bytes;
    if (until > from && madvise(base_ + from, until - from, MADV_DONTNEED) == 0) {
      n_bytes += until - from;
    }
    from = std::max(from, whole_pages(end));
  }
  return n_bytes;
}

// The memory is no longer used, so failures are ignored.
void WeightMemory::give_back() noexcept {
  if (base_ == nullptr) return;
  if (is_shared()) {
    const auto end = static_cast<off_t>(size_bytes_);
    [[maybe_unused]] const int failed =
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, end);
  } else {
    madvise(base_, size_bytes_, MADV_DONTNEED);
  }
}

void WeightMemory::release() noexcept {
  for (const Mapping& range : ranges_) munmap(range.address, range.size_bytes);
  if (base_ != nullptr) munmap(base_, size_bytes_);
  if (file_ >= 0) close(file_);
}

}  // namespace offload
