#include "ascend/argument_table.hpp"

#include <cstring>

#include "ascend/host_copies.hpp"
#include "ascend/missing_bytes.hpp"

namespace offload::acl {
namespace {

class HostRefresh final : public TableRefresh {
 public:
  HostRefresh(const Runtime& runtime, const TableParts& parts)
      : copies_(runtime),
        relocations_(parts.relocations),
        layout_(lay_out(parts.blocks, parts.words, parts.relocations, parts.triggers)),
        host_(table_content(layout_, parts.blocks)),
        device_(runtime, layout_.size_bytes, "allocating the table of kernel arguments"),
        missing_(layout_.size_bytes),
        patched_(parts.words.size()) {}

  const std::vector<Relocation>& relocations() const override { return relocations_; }

  void patch(const std::vector<Patch>& patches) noexcept override {
    for (const Patch& patch : patches) {
      const std::size_t at = layout_.word_offsets_bytes[patch.word];
      std::memcpy(host_.data() + at, &patch.address, sizeof patch.address);
      missing_.add(at, at + sizeof patch.address);
      patched_.note(patch.word);
    }
  }

  void enqueue(Stream stream, Submission& submission) override {
    patched_.require_all();
    if (missing_.empty()) return;
    copies_.copy(static_cast<unsigned char*>(device_.data()) + missing_.begin(),
                 host_.data() + missing_.begin(), missing_.size_bytes(), stream,
                 "copying kernel arguments");
    ++counts_.copies;
    counts_.bytes_copied += missing_.size_bytes();
    missing_.clear();
    submission.end_substage(kTableCopy);
  }

  void distrust() noexcept override { missing_.add(0, layout_.size_bytes); }

  const void* block(std::size_t index) const override {
    return static_cast<unsigned char*>(device_.data()) + layout_.block_offsets_bytes[index];
  }

 private:
  HostCopies copies_;
  std::vector<Relocation> relocations_;
  ArgumentLayout layout_;
  std::vector<unsigned char> host_;
  DeviceMemory device_;
  MissingBytes missing_;
  PatchedWords patched_;
};

}  // namespace

std::unique_ptr<TableRefresh> make_host_refresh(const Runtime& runtime, const TableParts& parts) {
  return std::make_unique<HostRefresh>(runtime, parts);
}

}  // namespace offload::acl
