#include "offload/header.hpp"

#include <stdexcept>

#include "check.hpp"

namespace {

using offload::Header;
using offload::HeaderCounts;
using offload::Policy;
using offload::Relocation;
using offload::Trigger;
using offload::test::throws;

// Slot 0 an input with three words, slot 1 an output with one, slot 2 the feature map with two,
// slot 3 a weight with one, slot 4 internal. The relocations are unsorted.
Header make_header() {
  return Header(
      {Trigger::kIo, Trigger::kIo, Trigger::kFeatureMap, Trigger::kWeight, Trigger::kInternal},
      {{5, 2, 64}, {0, 0, 0}, {6, 3, 8}, {2, 0, 16}, {4, 2, 0}, {3, 1, 0}, {1, 0, 4}});
}

void bind_all(Header& header, std::uint64_t first) {
  for (std::size_t slot = 0; slot < 4; ++slot) header.bind(slot, first + slot * 1000);
}

void first_refresh_writes_every_word() {
  Header header = make_header();
  bind_all(header, 10000);
  HeaderCounts counts;
  std::uint64_t words[7] = {};
  for (const auto& patch : header.refresh(counts)) words[patch.word] = patch.address;
  const std::uint64_t expected[7] = {10000, 10004, 10016, 11000, 12000, 12064, 13008};
  for (int word = 0; word < 7; ++word) CHECK_THAT(words[word] == expected[word]);
  CHECK_THAT(counts.policy == Policy::kAll);
  CHECK_THAT(counts.slots_changed == 4);
  CHECK_THAT(counts.words_patched == 7);
}

void nothing_changed_patches_nothing() {
  Header header = make_header();
  bind_all(header, 10000);
  HeaderCounts counts;
  header.refresh(counts);
  bind_all(header, 10000);
  CHECK_THAT(header.policy() == Policy::kNone);
  CHECK_THAT(header.refresh(counts).empty());
  CHECK_THAT(counts.slots_changed == 0);
}

void policies_follow_what_moved() {
  Header header = make_header();
  bind_all(header, 10000);
  HeaderCounts counts;
  header.refresh(counts);
  header.bind(0, 20000);
  CHECK_THAT(header.policy() == Policy::kIo);
  CHECK_THAT(header.refresh(counts).size() == 3);
  CHECK_THAT(counts.policy == Policy::kIo);
  header.bind(2, 30000);
  header.bind(1, 21000);
  const auto& patches = header.refresh(counts);
  CHECK_THAT(counts.policy == Policy::kAll);
  CHECK_THAT(patches.size() == 3);
  CHECK_THAT(patches[0].word == 3);  // inputs and outputs before the feature map
  header.bind(3, 40000);
  CHECK_THAT(header.policy() == Policy::kAll);
}

void moved_away_and_back_is_unchanged() {
  Header header = make_header();
  bind_all(header, 10000);
  HeaderCounts counts;
  header.refresh(counts);
  header.bind(0, 20000);
  header.bind(0, 10000);
  CHECK_THAT(header.policy() == Policy::kNone);
  header.bind(0, 20000);
  CHECK_THAT(header.refresh(counts).size() == 3);
}

void refuses_a_relocation_without_a_slot() {
  CHECK_THAT(
      throws<std::invalid_argument>([&] { const Header header({Trigger::kIo}, {{0, 1, 0}}); }));
}

}  // namespace

int main() {
  first_refresh_writes_every_word();
  nothing_changed_patches_nothing();
  policies_follow_what_moved();
  moved_away_and_back_is_unchanged();
  refuses_a_relocation_without_a_slot();
  return offload::test::result();
}
