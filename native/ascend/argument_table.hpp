// The table of a resident's kernel arguments on the device, and the ways to refresh it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ascend/argument_layout.hpp"
#include "ascend/host_copies.hpp"
#include "ascend/missing_bytes.hpp"
#include "ascend/runtime.hpp"
#include "ascend/substages.hpp"
#include "offload/header.hpp"

namespace offload::acl {

// The work of refreshes so far.
struct RefreshCounts {
  std::uint64_t copies = 0;          // of a range of the table, or of the base table
  std::uint64_t bytes_copied = 0;    // by these copies
  std::uint64_t gathers = 0;         // by the device, of all words
  std::uint64_t bytes_launched = 0;  // of bases that travelled in launch arguments
  std::uint64_t plans = 0;           // first phases of operators, including those at load
};

// Refreshes a table on a stream, before the kernels that read it.
//
// Owner: one resident, whose executions follow one another. Thread: callers serialise, with the
// device's context current except for relocations and patch. Errors: constructors and enqueue throw
// ExecutionError; after a failed enqueue, the next does everything that is missing.
class TableRefresh {
 public:
  virtual ~TableRefresh() = default;

  // The words that a header patches.
  virtual const std::vector<Relocation>& relocations() const = 0;

  // Writes words on the host.
  virtual void patch(const std::vector<Patch>& patches) noexcept = 0;

  // Enqueues what the device's table lacks; a no-op, without a substage, where it lacks nothing.
  // Throws ExecutionError while there are words that were never patched.
  virtual void enqueue(Stream stream, Submission& submission) = 0;

  // Invalidates the device's table: the next enqueue writes every word again. For an enqueued
  // refresh that may have failed on the device.
  virtual void distrust() noexcept = 0;

  // The address of a block's arguments on the device.
  virtual const void* block(std::size_t index) const = 0;

  const RefreshCounts& counts() const { return counts_; }

 protected:
  RefreshCounts counts_;
};

// A word that holds an address in its own block: that of this byte.
struct OwnAddress {
  ArgumentWord word;
  std::uint64_t target_bytes = 0;
};

// The parts of a table; see lay_out.
struct TableParts {
  std::vector<ArgumentBlock> blocks;
  std::vector<ArgumentWord> words;
  std::vector<Relocation> relocations;  // one for each word
  std::vector<Trigger> triggers;        // by slot
  std::vector<OwnAddress> own = {};     // constant, as the table does not move
};

// Throws std::invalid_argument for an own address whose word lies in no block, or that points
// behind its block.
void check_own(const TableParts& parts);

// Writes own addresses into a table's content; `table` is its address on the device.
void write_own(const ArgumentLayout& layout, const std::vector<OwnAddress>& own,
               std::uint64_t table, std::vector<unsigned char>& content);

// A table on the device and its image on the host, in which words are written: one copy covers the
// range from the first to the last word that changed. The image may change again at once: see
// HostCopies.
//
// Owner, thread, errors: as TableRefresh. The device's table is initially empty. The constructor
// throws std::invalid_argument as lay_out and check_own.
class HostTable {
 public:
  HostTable(const Runtime& runtime, const TableParts& parts);

  void write(std::uint32_t word, std::uint64_t address) noexcept;

  // Enqueues and counts the copy of what the device lacks; a no-op where it lacks nothing.
  void enqueue(Stream stream, Submission& submission, RefreshCounts& counts);

  // Copies the whole table, and waits.
  void upload();

  void distrust() noexcept { missing_.add(0, layout_.size_bytes); }

  const void* block(std::size_t index) const {
    return static_cast<const unsigned char*>(device_.data()) + layout_.block_offsets_bytes[index];
  }
  std::size_t n_words() const { return layout_.word_offsets_bytes.size(); }
  std::size_t size_bytes() const { return layout_.size_bytes; }

 private:
  const Runtime& runtime_;
  HostCopies copies_;
  ArgumentLayout layout_;
  std::vector<unsigned char> host_;
  DeviceMemory device_;
  MissingBytes missing_;
};

// Words are written by the host: see HostTable.
std::unique_ptr<TableRefresh> make_host_refresh(const Runtime& runtime, const TableParts& parts);

// A kernel that gathers args[w] = base[index[w]] + offset[w], with this argument block: addresses
// of args, index (uint32) and offset (uint64), the number of words, the address of the bases.
struct GatherKernel {
  Function function = nullptr;
  std::uint32_t n_blocks = 1;
};

inline constexpr std::size_t kGatherArgumentsBytes = 40;

// The bytes that go to the device with a launch itself, without a separate copy.
inline constexpr std::size_t kLaunchBytes = 1024;

// The device writes the words itself, by one kernel launch. The bases are in its arguments if they
// fit and the runtime takes arguments from the host; else the changed range of the base table is
// copied before. A header patches one word for each slot, its base. Throws BackendUnavailable where
// the runtime launches no kernels.
std::unique_ptr<TableRefresh> make_kernel_gather(const Runtime& runtime, const TableParts& parts,
                                                 const GatherKernel& kernel);

// The same by two operators of the Ascend operator libraries, where no kernel can be compiled: one
// copy of the changed range of the base table, aclnnIndexSelect, and aclnnAdd, whose result is the
// table itself. They are planned once if executors can be made repeatable, else at each gather.
// Throws BackendUnavailable where the operators are missing.
std::unique_ptr<TableRefresh> make_operator_gather(const Runtime& runtime, const TableParts& parts);

}  // namespace offload::acl
