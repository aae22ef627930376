// The part of a host image that the device lacks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "offload/errors.hpp"

namespace offload::acl {

// A range of bytes that the device lacks: the smallest that contains all added bytes.
//
// Owner: one image. Thread: callers serialise. Errors: none.
class MissingBytes {
 public:
  explicit MissingBytes(std::size_t size_bytes) : end_(size_bytes) {}

  void add(std::size_t begin, std::size_t end) noexcept {
    if (empty()) {
      begin_ = begin;
      end_ = end;
    } else {
      begin_ = std::min(begin_, begin);
      end_ = std::max(end_, end);
    }
  }
  void clear() noexcept { begin_ = end_ = 0; }
  bool empty() const noexcept { return begin_ == end_; }
  std::size_t begin() const noexcept { return begin_; }
  std::size_t size_bytes() const noexcept { return end_ - begin_; }

 private:
  std::size_t begin_ = 0;
  std::size_t end_;
};

// Which words were patched at least once.
//
// Owner, thread: as MissingBytes. Errors: require_all throws ExecutionError.
class PatchedWords {
 public:
  explicit PatchedWords(std::size_t n_words) : was_patched_(n_words), n_missing_(n_words) {}

  void note(std::uint32_t word) noexcept {
    n_missing_ -= was_patched_[word] == 0;
    was_patched_[word] = 1;
  }
  void require_all() const {
    if (n_missing_ == 0) return;
    throw ExecutionError(std::to_string(n_missing_) + " of " + std::to_string(was_patched_.size()) +
                         " address words were never patched: every slot must be bound first");
  }

 private:
  std::vector<std::uint8_t> was_patched_;
  std::size_t n_missing_;
};

}  // namespace offload::acl
