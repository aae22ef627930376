#include "ascend/argument_layout.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

namespace offload::acl {
namespace {

enum class Part : std::uint8_t { kIo, kAll, kNone };

std::size_t round_up(std::size_t n_bytes) {
  return (n_bytes + kBlockAlignmentBytes - 1) / kBlockAlignmentBytes * kBlockAlignmentBytes;
}

void check_words(const std::vector<ArgumentBlock>& blocks, const std::vector<ArgumentWord>& words) {
  for (std::size_t index = 0; index < words.size(); ++index) {
    const ArgumentWord& word = words[index];
    const std::size_t n_bytes = word.block < blocks.size() ? blocks[word.block].size() : 0;
    if (word.offset_bytes % 8 == 0 && n_bytes >= 8 && word.offset_bytes <= n_bytes - 8) continue;
    throw std::invalid_argument(
        "word " + std::to_string(index) + " (block " + std::to_string(word.block) + ", byte " +
        std::to_string(word.offset_bytes) + ") lies in no block, or not at a multiple of 8 bytes");
  }
}

// Two words at one place would be written in no defined order.
void check_places(std::vector<std::size_t> word_offsets_bytes) {
  std::sort(word_offsets_bytes.begin(), word_offsets_bytes.end());
  const auto twice = std::adjacent_find(word_offsets_bytes.begin(), word_offsets_bytes.end());
  if (twice == word_offsets_bytes.end()) return;
  throw std::invalid_argument("two words lie at byte " + std::to_string(*twice) +
                              " of the table: each address of a kernel is named once");
}

std::vector<Part> parts_of(std::size_t n_blocks, const std::vector<ArgumentWord>& words,
                           const std::vector<Relocation>& relocations,
                           const std::vector<Trigger>& triggers) {
  std::vector<Part> parts(n_blocks, Part::kNone);
  std::vector<bool> is_relocated(words.size());
  for (const Relocation& relocation : relocations) {
    if (relocation.slot >= triggers.size()) {
      throw std::invalid_argument("a relocation names a slot that does not exist");
    }
    if (relocation.word >= words.size() || is_relocated[relocation.word]) {
      throw std::invalid_argument("word " + std::to_string(relocation.word) +
                                  " does not exist, or has two relocations");
    }
    is_relocated[relocation.word] = true;
    Part& part = parts[words[relocation.word].block];
    part = std::min(part, triggers[relocation.slot] == Trigger::kIo ? Part::kIo : Part::kAll);
  }
  for (std::size_t word = 0; word < words.size(); ++word) {
    if (is_relocated[word]) continue;
    throw std::invalid_argument("word " + std::to_string(word) + " has no relocation");
  }
  return parts;
}

}  // namespace

ArgumentLayout lay_out(const std::vector<ArgumentBlock>& blocks,
                       const std::vector<ArgumentWord>& words,
                       const std::vector<Relocation>& relocations,
                       const std::vector<Trigger>& triggers) {
  check_words(blocks, words);
  const std::vector<Part> parts = parts_of(blocks.size(), words, relocations, triggers);
  ArgumentLayout layout;
  layout.block_offsets_bytes.resize(blocks.size());
  std::size_t end_bytes = 0;
  for (const Part part : {Part::kIo, Part::kAll, Part::kNone}) {
    for (std::size_t block = 0; block < blocks.size(); ++block) {
      if (parts[block] != part) continue;
      layout.block_offsets_bytes[block] = end_bytes;
      end_bytes += round_up(blocks[block].size());
    }
    if (part == Part::kIo) layout.io_bytes = end_bytes;
    if (part == Part::kAll) layout.refreshed_bytes = end_bytes;
  }
  layout.size_bytes = end_bytes;
  for (const ArgumentWord& word : words) {
    layout.word_offsets_bytes.push_back(layout.block_offsets_bytes[word.block] + word.offset_bytes);
  }
  check_places(layout.word_offsets_bytes);
  return layout;
}

std::vector<unsigned char> table_content(const ArgumentLayout& layout,
                                         const std::vector<ArgumentBlock>& blocks) {
  std::vector<unsigned char> content(layout.size_bytes);
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    std::copy(blocks[block].begin(), blocks[block].end(),
              content.begin() + static_cast<std::ptrdiff_t>(layout.block_offsets_bytes[block]));
  }
  return content;
}

GatherTables gather_tables(const ArgumentLayout& layout, const std::vector<ArgumentBlock>& blocks,
                           const std::vector<Relocation>& relocations,
                           const std::vector<Trigger>& triggers) {
  GatherTables tables;
  for (const Relocation& relocation : relocations) tables.slots.push_back(relocation.slot);
  std::sort(tables.slots.begin(), tables.slots.end(), [&](std::uint32_t one, std::uint32_t other) {
    return std::tuple(triggers[one], one) < std::tuple(triggers[other], other);
  });
  tables.slots.erase(std::unique(tables.slots.begin(), tables.slots.end()), tables.slots.end());
  std::vector<std::uint32_t> base_of(triggers.size());
  for (std::uint32_t base = 0; base < tables.slots.size(); ++base) {
    base_of[tables.slots[base]] = base;
  }
  const std::size_t n_words = layout.refreshed_bytes / 8;
  tables.index.assign(n_words, static_cast<std::uint32_t>(tables.slots.size()));
  tables.offset.resize(n_words);
  const std::vector<unsigned char> content = table_content(layout, blocks);
  if (n_words > 0) std::memcpy(tables.offset.data(), content.data(), layout.refreshed_bytes);
  for (const Relocation& relocation : relocations) {
    const std::size_t word = layout.word_offsets_bytes[relocation.word] / 8;
    tables.index[word] = base_of[relocation.slot];
    tables.offset[word] = relocation.offset_bytes;
  }
  return tables;
}

}  // namespace offload::acl
