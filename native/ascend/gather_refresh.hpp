// The common part of refreshes by a gather on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/host_copies.hpp"
#include "ascend/missing_bytes.hpp"

namespace offload::acl {

// Patches bases, one for each slot, on the host; a derived class makes the device write args[w] =
// base[index[w]] + offset[w], modulo 2^64, for all words of the table that may change.
//
// Owner, thread, errors: as TableRefresh.
class GatherRefresh : public TableRefresh {
 public:
  const std::vector<Relocation>& relocations() const final { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept final;
  void enqueue(Stream stream, Submission& submission) final;
  void distrust() noexcept final { missing_.add(0, bases_bytes()); }
  const void* block(std::size_t index) const final {
    return static_cast<unsigned char*>(table_.data()) + layout_.block_offsets_bytes[index];
  }

 protected:
  // The host's words begin with `n_head_words` for the derived class; the bases follow.
  GatherRefresh(const Runtime& runtime, const TableParts& parts, std::size_t n_head_words);

  // Enqueues the gather of all words, after a copy of the bases that the device lacks. Called only
  // with words, and with missing bases.
  virtual void gather(Stream stream, Submission& submission) = 0;

  // Enqueues and counts the copy of the bases that the device lacks, as a substage.
  void copy_bases(const DeviceMemory& bases, Stream stream, Submission& submission);

  const Runtime& runtime() const { return runtime_; }
  std::size_t n_words() const { return n_words_; }
  std::size_t bases_bytes() const { return 8 * (host_.size() - n_head_words_); }

  // The head, the bases, and a zero: the base of words that are not addresses.
  std::vector<std::uint64_t>& host() { return host_; }
  const DeviceMemory& table() const { return table_; }
  const DeviceMemory& index() const { return index_; }    // uint32, of a base, by word
  const DeviceMemory& offset() const { return offset_; }  // uint64, by word

 private:
  GatherRefresh(const Runtime& runtime, const TableParts& parts, std::size_t n_head_words,
                ArgumentLayout layout);
  GatherRefresh(const Runtime& runtime, const TableParts& parts, std::size_t n_head_words,
                ArgumentLayout layout, const GatherTables& tables);

  const Runtime& runtime_;
  HostCopies copies_;
  ArgumentLayout layout_;
  std::size_t n_words_;
  std::size_t n_head_words_;
  std::vector<std::uint64_t> host_;
  std::vector<Relocation> relocations_;
  DeviceMemory table_;
  DeviceMemory index_;
  DeviceMemory offset_;
  MissingBytes missing_;  // of the bases
  PatchedWords patched_;
};

}  // namespace offload::acl
