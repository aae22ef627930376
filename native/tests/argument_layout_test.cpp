#include "ascend/argument_layout.hpp"

#include <cstring>
#include <stdexcept>

#include "check.hpp"

namespace {

using offload::Relocation;
using offload::Trigger;
using offload::acl::ArgumentBlock;
using offload::acl::ArgumentLayout;
using offload::acl::ArgumentWord;
using offload::acl::GatherTables;
using offload::acl::kBlockAlignmentBytes;
using offload::test::throws;

// Slot 0 an input, 1 the feature map, 2 a weight, 3 an output. Block 0 never changes, 1 has a
// weight, 2 the feature map and an output, 3 an input and a weight.
const std::vector<Trigger> kTriggers = {Trigger::kIo, Trigger::kFeatureMap, Trigger::kWeight,
                                        Trigger::kIo};
const std::vector<ArgumentWord> kWords = {{1, 0}, {2, 8}, {2, 0}, {3, 0}, {3, 16}};
const std::vector<Relocation> kRelocations = {
    {0, 2, 0}, {1, 1, 64}, {2, 3, 0}, {3, 0, 4}, {4, 2, 32}};

std::vector<ArgumentBlock> make_blocks() {
  return {ArgumentBlock(16, 0xA0), ArgumentBlock(8, 0xA1), ArgumentBlock(100, 0xA2),
          ArgumentBlock(24, 0xA3)};
}

void blocks_lie_by_what_moves_them() {
  const ArgumentLayout layout =
      offload::acl::lay_out(make_blocks(), kWords, kRelocations, kTriggers);
  const std::size_t unit = kBlockAlignmentBytes;
  CHECK_THAT(layout.block_offsets_bytes ==
             (std::vector<std::size_t>{4 * unit, 3 * unit, 0, 2 * unit}));
  CHECK_THAT(layout.io_bytes == 3 * unit);
  CHECK_THAT(layout.refreshed_bytes == 4 * unit);
  CHECK_THAT(layout.size_bytes == 5 * unit);
  CHECK_THAT(layout.word_offsets_bytes ==
             (std::vector<std::size_t>{3 * unit, 8, 0, 2 * unit, 2 * unit + 16}));
}

void content_is_that_of_the_blocks() {
  const ArgumentLayout layout =
      offload::acl::lay_out(make_blocks(), kWords, kRelocations, kTriggers);
  const auto content = offload::acl::table_content(layout, make_blocks());
  CHECK_THAT(content.size() == layout.size_bytes);
  CHECK_THAT(content[99] == 0xA2 && content[100] == 0);
  CHECK_THAT(content[layout.block_offsets_bytes[0] + 15] == 0xA0);
}

// A gather writes the same words as the host would, including constants.
void gather_gives_the_words_of_the_host() {
  const auto blocks = make_blocks();
  const ArgumentLayout layout = offload::acl::lay_out(blocks, kWords, kRelocations, kTriggers);
  const GatherTables tables = offload::acl::gather_tables(layout, blocks, kRelocations, kTriggers);
  CHECK_THAT(tables.slots == (std::vector<std::uint32_t>{0, 3, 1, 2}));
  CHECK_THAT(tables.index.size() == layout.refreshed_bytes / 8);
  const std::uint64_t address[] = {1000, 2000, 3000, 4000};  // by slot
  auto expected = offload::acl::table_content(layout, blocks);
  for (const Relocation& one : kRelocations) {
    const std::uint64_t word = address[one.slot] + one.offset_bytes;
    std::memcpy(expected.data() + layout.word_offsets_bytes[one.word], &word, sizeof word);
  }
  for (std::size_t word = 0; word < tables.index.size(); ++word) {
    const std::uint32_t base = tables.index[word];
    const std::uint64_t from = base < tables.slots.size() ? address[tables.slots[base]] : 0;
    const std::uint64_t gathered = from + tables.offset[word];
    CHECK_THAT(std::memcmp(expected.data() + 8 * word, &gathered, sizeof gathered) == 0);
  }
}

void words_must_lie_in_blocks() {
  const auto lays_out = [](std::vector<ArgumentWord> words, std::vector<Relocation> relocations) {
    return throws<std::invalid_argument>(
        [&] { offload::acl::lay_out(make_blocks(), words, relocations, kTriggers); });
  };
  CHECK_THAT(!lays_out({{0, 8}}, {{0, 0, 0}}));
  CHECK_THAT(lays_out({{4, 0}}, {{0, 0, 0}}));                     // no such block
  CHECK_THAT(lays_out({{0, 4}}, {{0, 0, 0}}));                     // not aligned
  CHECK_THAT(lays_out({{0, 16}}, {{0, 0, 0}}));                    // after the block
  CHECK_THAT(lays_out({{0, ~std::size_t{7}}}, {{0, 0, 0}}));       // far after it
  CHECK_THAT(lays_out({{0, 8}, {0, 8}}, {{0, 0, 0}, {1, 3, 0}}));  // two words at one place
  CHECK_THAT(lays_out({{0, 0}}, {{0, 9, 0}}));                     // no such slot
  CHECK_THAT(lays_out({{0, 0}}, {}));                              // no relocation
  CHECK_THAT(lays_out({{0, 0}}, {{0, 0, 0}, {0, 1, 0}}));          // two
}

}  // namespace

int main() {
  blocks_lie_by_what_moves_them();
  content_is_that_of_the_blocks();
  gather_gives_the_words_of_the_host();
  words_must_lie_in_blocks();
  return offload::test::result();
}
