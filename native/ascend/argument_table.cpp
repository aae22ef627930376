#include "ascend/argument_table.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "ascend/table_copies.hpp"

namespace offload::acl {
namespace {

class HostRefresh final : public TableRefresh {
 public:
  HostRefresh(const Runtime& runtime, const TableParts& parts)
      : relocations_(parts.relocations), table_(runtime, parts), patched_(parts.words.size()) {}

  const std::vector<Relocation>& relocations() const override { return relocations_; }

  void patch(const std::vector<Patch>& patches) noexcept override {
    for (const Patch& patch : patches) {
      table_.write(patch.word, patch.address);
      patched_.note(patch.word);
    }
  }

  void enqueue(Stream stream, Submission& submission) override {
    patched_.require_all();
    table_.enqueue(stream, submission, counts_);
  }

  void distrust() noexcept override { table_.distrust(); }

  const void* block(std::size_t index) const override { return table_.block(index); }

 private:
  std::vector<Relocation> relocations_;
  HostTable table_;
  PatchedWords patched_;
};

}  // namespace

void check_own(const TableParts& parts) {
  for (const OwnAddress& own : parts.own) {
    const ArgumentWord& word = own.word;
    const std::size_t n_bytes =
        word.block < parts.blocks.size() ? parts.blocks[word.block].size() : 0;
    if (word.offset_bytes % 8 == 0 && n_bytes >= 8 && word.offset_bytes <= n_bytes - 8 &&
        own.target_bytes <= n_bytes) {
      continue;
    }
    throw std::invalid_argument("the own address at byte " + std::to_string(word.offset_bytes) +
                                " of block " + std::to_string(word.block) +
                                " lies in no block, or points behind it");
  }
}

void write_own(const ArgumentLayout& layout, const std::vector<OwnAddress>& own,
               std::uint64_t table, std::vector<unsigned char>& content) {
  for (const OwnAddress& one : own) {
    const std::size_t block_bytes = layout.block_offsets_bytes[one.word.block];
    const std::uint64_t address = table + block_bytes + one.target_bytes;
    std::memcpy(content.data() + block_bytes + one.word.offset_bytes, &address, sizeof address);
  }
}

HostTable::HostTable(const Runtime& runtime, const TableParts& parts)
    : runtime_(runtime),
      copies_(runtime),
      layout_(lay_out(parts.blocks, parts.words, parts.relocations, parts.triggers)),
      host_(table_content(layout_, parts.blocks)),
      device_(runtime, layout_.size_bytes, "allocating the table of kernel arguments"),
      missing_(layout_.size_bytes) {
  check_own(parts);
  write_own(layout_, parts.own, device_.address(), host_);
}

void HostTable::write(std::uint32_t word, std::uint64_t address) noexcept {
  const std::size_t at = layout_.word_offsets_bytes[word];
  if (std::memcmp(host_.data() + at, &address, sizeof address) == 0) return;
  std::memcpy(host_.data() + at, &address, sizeof address);
  missing_.add(at, at + sizeof address);
}

void HostTable::enqueue(Stream stream, Submission& submission, RefreshCounts& counts) {
  if (missing_.empty()) return;
  copies_.copy(static_cast<unsigned char*>(device_.data()) + missing_.begin(),
               host_.data() + missing_.begin(), missing_.size_bytes(), stream,
               "copying kernel arguments");
  ++counts.copies;
  counts.bytes_copied += missing_.size_bytes();
  missing_.clear();
  submission.end_substage(kTableCopy);
}

void HostTable::upload() {
  const RelaxedCapture relaxed(runtime_);
  acl::upload(runtime_, device_, host_, "copying kernel arguments");
  missing_.clear();
}

std::unique_ptr<TableRefresh> make_host_refresh(const Runtime& runtime, const TableParts& parts) {
  return std::make_unique<HostRefresh>(runtime, parts);
}

}  // namespace offload::acl
