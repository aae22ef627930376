#include "ascend/gather_refresh.hpp"

#include <cstring>
#include <utility>
#include <vector>

#include "ascend/table_copies.hpp"

namespace offload::acl {

GatherRefresh::GatherRefresh(const Runtime& runtime, const TableParts& parts,
                             std::size_t n_head_words)
    : GatherRefresh(runtime, parts, n_head_words,
                    lay_out(parts.blocks, parts.words, parts.relocations, parts.triggers)) {}

GatherRefresh::GatherRefresh(const Runtime& runtime, const TableParts& parts,
                             std::size_t n_head_words, ArgumentLayout layout)
    : GatherRefresh(runtime, parts, n_head_words, layout,
                    gather_tables(layout, parts.blocks, parts.relocations, parts.triggers)) {}

GatherRefresh::GatherRefresh(const Runtime& runtime, const TableParts& parts,
                             std::size_t n_head_words, ArgumentLayout layout,
                             const GatherTables& tables)
    : runtime_(runtime),
      copies_(runtime),
      layout_(std::move(layout)),
      n_words_(tables.index.size()),
      n_head_words_(n_head_words),
      host_(n_head_words + tables.slots.size() + 1),
      table_(runtime, layout_.size_bytes, "allocating the table of kernel arguments"),
      index_(runtime, n_words_ * 4, "allocating the index of the refresh"),
      offset_(runtime, n_words_ * 8, "allocating the offsets of the refresh"),
      missing_(8 * tables.slots.size() + 8),
      patched_(tables.slots.size()) {
  for (std::uint32_t base = 0; base < tables.slots.size(); ++base) {
    relocations_.push_back({base, tables.slots[base], 0});
  }
  check_own(parts);
  std::vector<unsigned char> content = table_content(layout_, parts.blocks);
  write_own(layout_, parts.own, table_.address(), content);
  std::vector<std::uint64_t> offsets = tables.offset;
  for (const OwnAddress& own : parts.own) {  // constants, as all words that are no slot's address
    const std::size_t at = layout_.block_offsets_bytes[own.word.block] + own.word.offset_bytes;
    if (at / 8 < offsets.size()) std::memcpy(&offsets[at / 8], content.data() + at, 8);
  }
  upload(runtime, table_, content, "copying kernel arguments");
  upload(runtime, index_, tables.index, "copying the index of the refresh");
  upload(runtime, offset_, offsets, "copying the offsets of the refresh");
}

void GatherRefresh::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) {
    host_[n_head_words_ + patch.word] = patch.address;
    missing_.add(8 * patch.word, 8 * patch.word + 8);
    patched_.note(patch.word);
  }
}

void GatherRefresh::enqueue(Stream stream, Submission& submission) {
  patched_.require_all();
  if (missing_.empty() || n_words_ == 0) return;
  gather(stream, submission);
  ++counts_.gathers;
  missing_.clear();
  submission.end_substage(kRefreshLaunch);
}

void GatherRefresh::copy_bases(const DeviceMemory& bases, Stream stream, Submission& submission) {
  const auto* const host = reinterpret_cast<const unsigned char*>(host_.data() + n_head_words_);
  copies_.copy(static_cast<unsigned char*>(bases.data()) + missing_.begin(),
               host + missing_.begin(), missing_.size_bytes(), stream, "copying the base table");
  ++counts_.copies;
  counts_.bytes_copied += missing_.size_bytes();
  submission.end_substage(kBaseCopy);
}

}  // namespace offload::acl
