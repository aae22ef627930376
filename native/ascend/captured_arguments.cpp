#include "ascend/captured_arguments.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace offload::acl {
namespace {

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);

void check_words(const CapturedWords& parts) {
  if (parts.words.size() != parts.relocations.size()) {
    throw std::invalid_argument("each word of a captured block needs one relocation");
  }
  for (std::uint32_t index = 0; index < parts.words.size(); ++index) {
    const ArgumentWord& word = parts.words[index];
    const bool is_in_block =
        word.block < parts.blocks.size() && word.offset_bytes % kWordBytes == 0 &&
        word.offset_bytes + kWordBytes <= parts.blocks[word.block].content.size();
    if (!is_in_block || parts.relocations[index].word != index) {
      throw std::invalid_argument("word " + std::to_string(index) +
                                  " lies in no captured block, or is not the one relocated");
    }
  }
}

}  // namespace

CapturedArguments::CapturedArguments(const Runtime& runtime, CapturedWords words, HostTable* table)
    : runtime_(runtime),
      parts_(std::move(words)),
      table_(table),
      missing_(parts_.blocks.size(), MissingBytes(0)),
      patched_(parts_.words.size()) {
  check_words(parts_);
  if (table_ != nullptr && table_->n_words() != parts_.words.size()) {
    throw std::invalid_argument("the argument table of a captured model has other words");
  }
  stale_.reserve(parts_.blocks.size());
  for (const ArgumentWord& word : parts_.words) {
    std::uint64_t held = 0;
    std::memcpy(&held, parts_.blocks[word.block].content.data() + word.offset_bytes, kWordBytes);
    captured_.push_back(held);
  }
}

void CapturedArguments::miss(std::uint32_t block, std::size_t begin, std::size_t end) noexcept {
  if (missing_[block].empty()) stale_.push_back(block);
  missing_[block].add(begin, end);
}

void CapturedArguments::patch(const Patch& patch) noexcept {
  const Relocation& relocation = parts_.relocations[patch.word];
  const bool is_home = relocation.slot == parts_.feature_map_slot &&
                       patch.address == parts_.home + relocation.offset_bytes;
  const std::uint64_t address = is_home ? captured_[patch.word] : patch.address;
  patched_.note(patch.word);
  if (table_ != nullptr) {
    table_->write(patch.word, address);
  } else {
    write(patch.word, address);
  }
}

void CapturedArguments::write(std::uint32_t word, std::uint64_t address) noexcept {
  const auto [block, offset_bytes] = parts_.words[word];
  unsigned char* const place = parts_.blocks[block].content.data() + offset_bytes;
  if (std::memcmp(place, &address, kWordBytes) == 0) return;
  std::memcpy(place, &address, kWordBytes);
  miss(block, offset_bytes, offset_bytes + kWordBytes);
}

void CapturedArguments::enqueue(Stream stream, Submission& submission) {
  patched_.require_all();
  if (table_ != nullptr) return table_->enqueue(stream, submission, counts_);
  if (stale_.empty()) return;
  copy_blocks(stream);
  submission.end_substage(kTableCopy);
}

void CapturedArguments::copy_blocks(Stream stream) {
  while (!stale_.empty()) {
    const CapturedBlock& block = parts_.blocks[stale_.back()];
    MissingBytes& missing = missing_[stale_.back()];
    runtime_.check(
        runtime_.memcpy_async(reinterpret_cast<void*>(block.address + missing.begin()),
                              missing.size_bytes(), block.content.data() + missing.begin(),
                              missing.size_bytes(), kHostToBufferToDevice, stream),
        "copying addresses into the arguments of a captured kernel");
    ++counts_.copies;
    counts_.bytes_copied += missing.size_bytes();
    missing.clear();
    stale_.pop_back();
  }
}

void CapturedArguments::distrust() noexcept {
  if (table_ != nullptr) return table_->distrust();
  for (const ArgumentWord& word : parts_.words) {
    miss(word.block, word.offset_bytes, word.offset_bytes + kWordBytes);
  }
}

}  // namespace offload::acl
