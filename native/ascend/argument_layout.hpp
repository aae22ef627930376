// The places of kernels' argument blocks in one table, and the words that a refresh writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/header.hpp"

namespace offload::acl {

// The arguments of one kernel as they lie in memory; the content of address words is ignored.
using ArgumentBlock = std::vector<unsigned char>;

// An eight-byte word that holds an address: its block, and its offset there.
struct ArgumentWord {
  std::uint32_t block = 0;
  std::size_t offset_bytes = 0;
};

// Blocks in one table, in three parts: first those with a word of an input or output, then those
// with a word of the feature map or a weight, then constant blocks. So each policy touches one
// contiguous range.
struct ArgumentLayout {
  std::vector<std::size_t> block_offsets_bytes;  // by block
  std::vector<std::size_t> word_offsets_bytes;   // by word
  std::size_t io_bytes = 0;                      // the end of the first part
  std::size_t refreshed_bytes = 0;               // the end of the second
  std::size_t size_bytes = 0;
};

// Blocks begin at multiples of this: our choice, a line of most caches.
inline constexpr std::size_t kBlockAlignmentBytes = 64;

// Within a part blocks keep their order. Throws std::invalid_argument for a word that lies in no
// block, is not aligned to eight bytes, shares its place with another, or does not have exactly one
// relocation, and for a relocation whose slot does not exist.
ArgumentLayout lay_out(const std::vector<ArgumentBlock>& blocks,
                       const std::vector<ArgumentWord>& words,
                       const std::vector<Relocation>& relocations,
                       const std::vector<Trigger>& triggers);

// All blocks at their places, with zeros between them.
std::vector<unsigned char> table_content(const ArgumentLayout& layout,
                                         const std::vector<ArgumentBlock>& blocks);

// The refreshed words of a table as a gather: word = base[index] + offset. A word that is not an
// address has the base after the last, which is zero, and its value as the offset.
struct GatherTables {
  std::vector<std::uint32_t> slots;  // by base: slots with words, inputs and outputs first
  std::vector<std::uint32_t> index;  // by word of the table
  std::vector<std::uint64_t> offset;
};

// Errors: as lay_out, which made the layout from the same arguments.
GatherTables gather_tables(const ArgumentLayout& layout, const std::vector<ArgumentBlock>& blocks,
                           const std::vector<Relocation>& relocations,
                           const std::vector<Trigger>& triggers);

}  // namespace offload::acl
