// A program on an Ascend device whose kernels the host launches one by one, at varying sizes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ascend/argument_layout.hpp"
#include "ascend/stream_resident.hpp"
#include "offload/host_stages.hpp"
#include "run/instances.hpp"

namespace offload::acl {

// An eight-byte word in an argument block that is an address in a Value.
struct BlockAddress {
  std::size_t offset_bytes = 0;  // in the block
  std::size_t value = 0;
  std::int64_t value_offset_bytes = 0;
};

// One kernel of a launch at one choice of sizes.
struct SizedKernel {
  std::uint32_t n_blocks = 1;  // 0: nothing to compute, not launched
  ArgumentBlock block;
  std::vector<BlockAddress> addresses;
  std::vector<PlaceHolder> own_addresses;  // words that hold an address in the block itself
};

// One launch of the program, at any sizes.
struct ScheduledLaunch {
  std::string name;                       // of its operator, with the user's line
  std::vector<Function> functions;        // by kernel
  std::vector<std::size_t> blocks_bytes;  // by kernel: the maximum of its argument block
};

// Where a Value lies: in a slot at an offset, in the feature map at an offset that depends on
// sizes, or in the size constant of this number.
struct ValuePlace {
  enum class Kind : std::uint8_t { kNowhere, kSlot, kFeatureMap, kConstant };
  Kind kind = Kind::kNowhere;
  std::size_t index = 0;  // of the slot, or of the constant
  std::int64_t offset_bytes = 0;
};

// A view among the arguments of launches, for the check that it lies in its Value.
struct CheckedView {
  std::size_t value = 0;
  std::int64_t item_bytes = 1;
  std::vector<std::int64_t> numbers;  // its sizes, its strides, and its offset in bytes
  std::vector<VaryingNumber> varying;
};

struct ScheduledProgram {
  // The kernels of a launch at these sizes, by Dim. Called on several threads; may throw any
  // exception.
  using Tile = std::function<std::vector<SizedKernel>(std::size_t launch,
                                                      const std::vector<std::int64_t>& sizes)>;

  int device = 0;
  std::vector<ScheduledLaunch> launches;
  std::vector<ValuePlace> values;
  std::vector<CheckedView> views;
  std::vector<std::string> dims;  // their names
  Tile tile;
  bool tiles_first = false;  // every launch is tiled before the first is launched
  int n_cores = 1;
  bool copies_on_device = true;  // see StreamResident
};

// Executes a program of kernels at varying sizes, without a model: for each kernel it calls
// aclrtLaunchKernelWithHostArgs, which copies the argument block.
//
// Grids and argument blocks belong to one choice of sizes. The first execution at new sizes makes
// them, launch by launch (HostStages): tile, write addresses, launch. They are kept with the sizes;
// later executions write addresses and launch, on the calling thread only. A launch whose tiling
// failed is tiled again by the next execution.
//
// Owner, thread, errors: as StreamResident and SizeChanges. The constructor throws
// BackendUnavailable where the runtime does not take arguments from the host, std::invalid_argument
// for launches without kernels and for unknown values. execute throws what `tile` throws, and
// ExecutionError, which names launch and sizes, for a block beyond its maximum, for another number
// of kernels, and where the runtime fails. Earlier launches have been enqueued then, unless
// `tiles_first`.
class ScheduledResident final : public StreamResident, public SizeChanges, private StagedLaunches {
 public:
  explicit ScheduledResident(ScheduledProgram program);
  ~ScheduledResident() override;

  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return program_.launches.size(); }
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  bool delivers_launches() const override { return true; }
  SizeChanges* size_changes() override { return this; }

  void check(const SizedProgram& sizes) const override;
  std::shared_ptr<SizedWork> work_of(const std::vector<std::int64_t>& sizes) const override;
  void resize(const SizedProgram& sizes) override;

  // Observes the stages of later executions; null: no observer. Called between executions.
  void watch(std::shared_ptr<StageWatcher> watcher) { watcher_ = std::move(watcher); }

  // The number of executions through stages, as some launch was not tiled yet.
  std::uint64_t n_staged() const { return n_staged_; }

 private:
  // The launches of one choice of sizes. Each launch is written by one thread; HostStages orders
  // this before the other stages.
  struct Tiled : SizedWork {
    std::vector<std::int64_t> sizes;
    std::vector<std::vector<SizedKernel>> kernels;  // by launch
    std::vector<std::uint8_t> is_tiled;             // by launch
    bool is_complete = false;
  };

  // Size constants that earlier executions may still read.
  struct Constants {
    std::vector<c10::Storage> storages;
    std::shared_ptr<Fence> read;  // the end of these executions
  };

  void release() noexcept override;
  void abandon() noexcept override;
  void carry_out(HostStage stage, std::size_t launch) override;
  void tile(std::size_t launch);
  void write_addresses(std::size_t launch) noexcept;
  void launch_kernels(std::size_t launch);
  void launch_all();
  void stage_all();
  void take_constants(const SizedProgram& sizes);
  std::uint64_t address_of(std::size_t value) const;
  [[noreturn]] void refuse(std::size_t launch, const std::string& why) const;
  std::string told(std::size_t launch) const;

  ScheduledProgram program_;
  std::vector<std::size_t> slots_;        // that are patched, ascending
  std::vector<std::uint64_t> addresses_;  // by slot
  std::shared_ptr<Tiled> tiled_;          // of the present sizes
  std::shared_ptr<const SizedPlaces> places_;
  std::vector<c10::Storage> constants_;
  std::shared_ptr<Fence> constants_end_;  // of the copy that transferred them; null once waited for
  std::deque<Constants> retired_;
  std::shared_ptr<StageWatcher> watcher_;
  std::atomic<std::uint64_t> n_staged_ = 0;
  LaunchTimes* times_ = nullptr;  // of the running execution
  HostStages stages_;             // last, so that its threads end before what they use
};

}  // namespace offload::acl
