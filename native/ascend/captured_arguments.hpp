// The arguments of a captured model's own kernels, and their addresses that move.
#pragma once

#include <cstdint>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/missing_bytes.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// A block of the runtime: its address on the device, and its content.
struct CapturedBlock {
  std::uint64_t address = 0;
  ArgumentBlock content;
};

// The words of a model's kernels that are patched.
struct CapturedWords {
  std::vector<CapturedBlock> blocks;
  std::vector<ArgumentWord> words;
  std::vector<Relocation> relocations;  // one for each word, by its index
  std::uint32_t feature_map_slot = 0;
  std::uint64_t home = 0;  // stands for the feature map where it was captured, piece by piece
};

// If the kernels read their arguments from offload's table, words are written there, and one copy
// before an execution transfers the range from the first to the last changed word.
//
// Otherwise words are written in host images of the runtime's blocks. Before an execution each
// block with a changed word is updated by one HOST_TO_BUF_TO_DEVICE copy of the range from the
// first to the last changed word; the runtime stages it, so the image may change again at once.
// Unchanged blocks are not copied.
//
// A feature map that is bound to `home` lies where it was captured: its words get their captured
// content, even where its pieces are not contiguous.
//
// Owner: one resident, whose executions follow one another; the model outlives it, and so does the
// table, which only patch and enqueue use. Thread: callers serialise; enqueue with the device's
// context current. Errors: the constructor throws std::invalid_argument for a word that lies in no
// block or is not aligned to eight bytes, unless each word has its relocation, and unless the
// table, if not null, has as many; enqueue throws ExecutionError, also while there are words that
// were never patched: after a failed enqueue, the next does everything that is missing.
class CapturedArguments {
 public:
  CapturedArguments(const Runtime& runtime, CapturedWords words, HostTable* table);

  const std::vector<Relocation>& relocations() const { return parts_.relocations; }
  void patch(const Patch& patch) noexcept;
  void enqueue(Stream stream, Submission& submission);

  // Invalidates what was enqueued: the next enqueue writes the table, or every block with a word,
  // again.
  void distrust() noexcept;

  const RefreshCounts& counts() const { return counts_; }
  std::uint64_t home() const { return parts_.home; }

 private:
  void miss(std::uint32_t block, std::size_t begin, std::size_t end) noexcept;
  void write(std::uint32_t word, std::uint64_t address) noexcept;
  void copy_blocks(Stream stream);

  const Runtime& runtime_;
  CapturedWords parts_;
  HostTable* table_;
  std::vector<std::uint64_t> captured_;  // by word: its captured content
  std::vector<MissingBytes> missing_;    // by block
  std::vector<std::uint32_t> stale_;     // blocks with missing bytes
  PatchedWords patched_;
  RefreshCounts counts_;
};

}  // namespace offload::acl
