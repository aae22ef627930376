#include "ascend/argument_table.hpp"

#include <algorithm>
#include <cstring>

#include "ascend/missing_bytes.hpp"

namespace offload::acl {
namespace {

// Copies a range of a host image to the same place of device memory; staged at the call.
void copy_range(const Runtime& runtime, const DeviceMemory& memory, const unsigned char* host,
                const MissingBytes& range, Stream stream, const char* what) {
  runtime.check(runtime.memcpy_async(static_cast<unsigned char*>(memory.data()) + range.begin(),
                                     range.size_bytes(), host + range.begin(), range.size_bytes(),
                                     kHostToBufferToDevice, stream),
                what);
}

class HostRefresh final : public TableRefresh {
 public:
  HostRefresh(const Runtime& runtime, const TableParts& parts)
      : runtime_(runtime),
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

  void enqueue(Stream stream) override {
    patched_.require_all();
    if (missing_.empty()) return;
    copy_range(runtime_, device_, host_.data(), missing_, stream, "copying kernel arguments");
    ++counts_.copies;
    counts_.bytes_copied += missing_.size_bytes();
    missing_.clear();
  }

  void distrust() noexcept override { missing_.add(0, layout_.size_bytes); }

  const void* block(std::size_t index) const override {
    return static_cast<unsigned char*>(device_.data()) + layout_.block_offsets_bytes[index];
  }

 private:
  const Runtime& runtime_;
  std::vector<Relocation> relocations_;
  ArgumentLayout layout_;
  std::vector<unsigned char> host_;
  DeviceMemory device_;
  MissingBytes missing_;
  PatchedWords patched_;
};

template <typename Item>
void upload(const Runtime& runtime, const DeviceMemory& memory, const std::vector<Item>& items,
            const char* what) {
  if (items.empty()) return;
  const std::size_t n_bytes = items.size() * sizeof(Item);
  runtime.check(
      runtime.memcpy(memory.data(), memory.size_bytes(), items.data(), n_bytes, kHostToDevice),
      what);
}

// The words of a gather's argument block, after which the bases follow where they fit.
enum GatherArgument : std::size_t { kTable, kIndex, kOffset, kCount, kBases, kFirstBase };
static_assert(kFirstBase * 8 == kGatherArgumentsBytes);

class GatherRefresh final : public TableRefresh {
 public:
  GatherRefresh(const Runtime& runtime, const TableParts& parts, const GatherKernel& kernel)
      : GatherRefresh(runtime, parts, kernel,
                      lay_out(parts.blocks, parts.words, parts.relocations, parts.triggers)) {}

  const std::vector<Relocation>& relocations() const override { return relocations_; }

  void patch(const std::vector<Patch>& patches) noexcept override {
    for (const Patch& patch : patches) {
      arguments_[kFirstBase + patch.word] = patch.address;
      missing_.add(8 * patch.word, 8 * patch.word + 8);
      patched_.note(patch.word);
    }
  }

  void enqueue(Stream stream) override {
    patched_.require_all();
    if (missing_.empty() || n_words_ == 0) return;
    if (fits_) {
      launch_with_bases(stream);
    } else {
      copy_range(runtime_, bases_, host_bases(), missing_, stream, "copying the base table");
      ++counts_.copies;
      counts_.bytes_copied += missing_.size_bytes();
      runtime_.check(runtime_.launch_kernel(kernel_.function, kernel_.n_blocks, block_.data(),
                                            kGatherArgumentsBytes, stream),
                     "launching the refresh of kernel arguments");
    }
    ++counts_.gathers;
    missing_.clear();
  }

  void distrust() noexcept override { missing_.add(0, 8 * (arguments_.size() - kFirstBase)); }

  const void* block(std::size_t index) const override {
    return static_cast<unsigned char*>(table_.data()) + layout_.block_offsets_bytes[index];
  }

 private:
  GatherRefresh(const Runtime& runtime, const TableParts& parts, const GatherKernel& kernel,
                ArgumentLayout layout)
      : GatherRefresh(runtime, parts, kernel, layout,
                      gather_tables(layout, parts.blocks, parts.relocations, parts.triggers)) {}

  GatherRefresh(const Runtime& runtime, const TableParts& parts, const GatherKernel& kernel,
                ArgumentLayout layout, const GatherTables& tables)
      : runtime_(runtime),
        kernel_(kernel),
        layout_(std::move(layout)),
        n_words_(tables.index.size()),
        arguments_(kFirstBase + tables.slots.size() + 1),
        fits_(runtime.has(Capability::kHostArguments) && arguments_.size() * 8 <= kLaunchBytes),
        table_(runtime, layout_.size_bytes, "allocating the table of kernel arguments"),
        index_(runtime, n_words_ * 4, "allocating the index of the refresh"),
        offset_(runtime, n_words_ * 8, "allocating the offsets of the refresh"),
        bases_(runtime, fits_ ? 0 : 8 * tables.slots.size() + 8, "allocating the base table"),
        block_(runtime, fits_ ? 0 : kGatherArgumentsBytes, "allocating the refresh's arguments"),
        missing_(8 * tables.slots.size() + 8),
        patched_(tables.slots.size()) {
    for (std::uint32_t base = 0; base < tables.slots.size(); ++base) {
      relocations_.push_back({base, tables.slots[base], 0});
    }
    upload(runtime, table_, table_content(layout_, parts.blocks), "copying kernel arguments");
    upload(runtime, index_, tables.index, "copying the index of the refresh");
    upload(runtime, offset_, tables.offset, "copying the offsets of the refresh");
    arguments_[kTable] = table_.address();
    arguments_[kIndex] = index_.address();
    arguments_[kOffset] = offset_.address();
    arguments_[kCount] = n_words_;
    arguments_[kBases] = bases_.address();
    if (fits_) return;
    const std::vector<std::uint64_t> head(arguments_.begin(), arguments_.begin() + kFirstBase);
    upload(runtime, block_, head, "copying the refresh's arguments");
  }

  void launch_with_bases(Stream stream) {
    PlaceHolder bases = {8 * kBases, 8 * kFirstBase};
    const std::size_t n_bytes = arguments_.size() * 8;
    runtime_.check(
        runtime_.launch_with_host_arguments(kernel_.function, kernel_.n_blocks, stream, nullptr,
                                            arguments_.data(), n_bytes, &bases, 1),
        "launching the refresh of kernel arguments");
    counts_.bytes_launched += n_bytes;
  }

  const unsigned char* host_bases() const {
    return reinterpret_cast<const unsigned char*>(arguments_.data() + kFirstBase);
  }

  const Runtime& runtime_;
  GatherKernel kernel_;
  ArgumentLayout layout_;
  std::size_t n_words_;
  std::vector<std::uint64_t> arguments_;  // the block, then the bases, then a zero
  bool fits_;
  std::vector<Relocation> relocations_;
  DeviceMemory table_;
  DeviceMemory index_;
  DeviceMemory offset_;
  DeviceMemory bases_;
  DeviceMemory block_;
  MissingBytes missing_;  // of the bases
  PatchedWords patched_;
};

}  // namespace

std::unique_ptr<TableRefresh> make_host_refresh(const Runtime& runtime, const TableParts& parts) {
  return std::make_unique<HostRefresh>(runtime, parts);
}

std::unique_ptr<TableRefresh> make_gather_refresh(const Runtime& runtime, const TableParts& parts,
                                                  const GatherKernel& kernel) {
  runtime.require(Capability::kKernelLaunch, "refreshing kernel arguments by a kernel");
  return std::make_unique<GatherRefresh>(runtime, parts, kernel);
}

}  // namespace offload::acl
