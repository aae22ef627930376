#include "ascend/scheduled_resident.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>
#include <utility>

#include "offload/errors.hpp"
#include "run/varying_numbers.hpp"

namespace offload::acl {
namespace {

// Constants of other sizes are kept until executions that read them have ended, for at most this
// many sizes. Beyond that the next change of sizes waits.
constexpr std::size_t kRetired = 4;

void check_program(const ScheduledProgram& program) {
  for (const ScheduledLaunch& launch : program.launches) {
    if (launch.functions.empty() || launch.functions.size() != launch.blocks_bytes.size()) {
      throw std::invalid_argument("each launch needs kernels, and room for their arguments");
    }
  }
  for (const CheckedView& view : program.views) {
    static_cast<void>(program.values.at(view.value));
    check_numbers(view.numbers, view.varying, view.numbers.size() / 2);
  }
}

}  // namespace

ScheduledResident::ScheduledResident(ScheduledProgram program)
    : StreamResident(program.device, program.copies_on_device),
      program_(std::move(program)),
      stages_(program_.n_cores, static_cast<const Resident*>(this)) {
  runtime().require(Capability::kKernelLaunch, "launching custom kernels");
  runtime().require(Capability::kHostArguments, "launching kernels at sizes that vary");
  check_program(program_);
  std::set<std::size_t> slots;
  for (const ValuePlace& place : program_.values) {
    const bool is_slot =
        place.kind == ValuePlace::Kind::kSlot || place.kind == ValuePlace::Kind::kFeatureMap;
    if (is_slot) slots.insert(place.index);
  }
  slots_.assign(slots.begin(), slots.end());
  addresses_.resize(slots_.empty() ? 0 : slots_.back() + 1);
}

ScheduledResident::~ScheduledResident() { close_for_good(); }

std::vector<Relocation> ScheduledResident::relocations() const {
  std::vector<Relocation> all;
  for (std::size_t word = 0; word < slots_.size(); ++word) {
    all.push_back({static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(slots_[word]), 0});
  }
  return all;
}

void ScheduledResident::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) addresses_[slots_[patch.word]] = patch.address;
}

void ScheduledResident::check(const SizedProgram& sizes) const {
  std::vector<std::int64_t> numbers;
  for (const CheckedView& view : program_.views) {
    numbers = view.numbers;
    set_numbers(numbers, view.varying, sizes);
    check_reach(numbers, view.item_bytes, sizes.values_bytes.at(view.value));
  }
  check_rooms(sizes);
}

std::shared_ptr<SizedWork> ScheduledResident::work_of(
    const std::vector<std::int64_t>& sizes) const {
  auto work = std::make_shared<Tiled>();
  work->sizes = sizes;
  work->kernels.resize(program_.launches.size());
  work->is_tiled.resize(program_.launches.size());
  work->size_bytes = sizeof(Tiled) + sizes.size() * sizeof(std::int64_t);
  for (const ScheduledLaunch& launch : program_.launches) {
    for (const std::size_t block_bytes : launch.blocks_bytes) {
      // A word of a block is at most one address, of a Value or of the block itself.
      work->size_bytes += sizeof(SizedKernel) + block_bytes +
                          block_bytes / sizeof(std::uint64_t) * sizeof(BlockAddress);
    }
  }
  return work;
}

void ScheduledResident::resize(const SizedProgram& sizes) {
  take_constants(sizes);
  tiled_ = std::static_pointer_cast<Tiled>(sizes.work);
  places_ = sizes.places;
}

// Executions on the device may still read the previous constants. A failed device refuses the
// fence: its memory is kept until close.
void ScheduledResident::take_constants(const SizedProgram& sizes) {
  if (!constants_.empty()) {
    Constants old{std::move(constants_), nullptr};
    constants_.clear();
    try {
      old.read = fence();
    } catch (const std::exception&) {  // the device failed, which its next call reports
    }
    retired_.push_back(std::move(old));
  }
  while (retired_.size() > kRetired) {
    const std::shared_ptr<Fence> read = retired_.front().read;
    try {
      if (read) read->wait();
    } catch (const std::exception&) {  // likewise
    }
    retired_.pop_front();
  }
  constants_ = sizes.constants;
  constants_end_ = sizes.constants_end;
}

void ScheduledResident::execute(Submission& submission, LaunchTimes* times) {
  refuse_closed();
  if (!tiled_) throw ExecutionError("no sizes were chosen for the execution");
  const ContextScope scope(runtime(), device());
  note_enqueued();
  if (constants_end_)
    std::exchange(constants_end_, nullptr)->wait();  // they were copied on torch's stream
  submission.end_ns = now_ns();
  times_ = times;
  if (tiled_->is_complete) return launch_all();
  ++n_staged_;
  if (!program_.tiles_first) return stage_all();
  for (std::size_t launch = 0; launch < n_launches(); ++launch) tile(launch);
  tiled_->is_complete = true;
  launch_all();
}

void ScheduledResident::launch_all() {
  for (std::size_t launch = 0; launch < n_launches(); ++launch) {
    write_addresses(launch);
    launch_kernels(launch);
  }
}

void ScheduledResident::stage_all() {
  stages_.run(*this, watcher_.get());
  tiled_->is_complete = true;
}

void ScheduledResident::issue(std::size_t launch) {
  refuse_closed();
  if (!tiled_) throw ExecutionError("no sizes were chosen for the execution");
  const ContextScope scope(runtime(), device());
  note_enqueued();
  times_ = nullptr;
  tile(launch);
  write_addresses(launch);
  launch_kernels(launch);
}

void ScheduledResident::carry_out(HostStage stage, std::size_t launch) {
  switch (stage) {
    case HostStage::kTile:
      return tile(launch);
    case HostStage::kMemory:
      return write_addresses(launch);
    case HostStage::kLaunch:
      return launch_kernels(launch);
  }
}

// Stores results only once all of them fit.
void ScheduledResident::tile(std::size_t launch) {
  Tiled& tiled = *tiled_;
  if (tiled.is_tiled[launch] != 0) return;
  const ScheduledLaunch& described = program_.launches[launch];
  std::vector<SizedKernel> made = program_.tile(launch, tiled.sizes);
  if (made.size() != described.functions.size()) {
    refuse(launch, "it has " + std::to_string(made.size()) + " kernels, expected " +
                       std::to_string(described.functions.size()) + " as at the recorded sizes");
  }
  for (std::size_t kernel = 0; kernel < made.size(); ++kernel) {
    const SizedKernel& one = made[kernel];
    if (one.block.size() > described.blocks_bytes[kernel]) {
      refuse(launch, "the argument block of kernel " + std::to_string(kernel) + " has " +
                         std::to_string(one.block.size()) + " bytes, expected at most " +
                         std::to_string(described.blocks_bytes[kernel]));
    }
    const auto lies_in_block = [&](std::size_t offset_bytes) {
      return offset_bytes % 8 == 0 && one.block.size() >= 8 && offset_bytes <= one.block.size() - 8;
    };
    for (const BlockAddress& address : one.addresses) {
      if (!lies_in_block(address.offset_bytes) || address.value >= program_.values.size() ||
          program_.values[address.value].kind == ValuePlace::Kind::kNowhere) {
        refuse(launch, "an address of its arguments lies in no block, or belongs to no tensor");
      }
    }
    for (const PlaceHolder& own : one.own_addresses) {
      if (!lies_in_block(own.address_offset) || own.data_offset > one.block.size()) {
        refuse(launch, "an address of its arguments in their own block lies outside of it");
      }
    }
  }
  tiled.kernels[launch] = std::move(made);
  tiled.is_tiled[launch] = 1;
}

std::uint64_t ScheduledResident::address_of(std::size_t value) const {
  const ValuePlace& place = program_.values[value];
  switch (place.kind) {
    case ValuePlace::Kind::kSlot:
      return addresses_[place.index] + static_cast<std::uint64_t>(place.offset_bytes);
    case ValuePlace::Kind::kFeatureMap:
      return addresses_[place.index] + static_cast<std::uint64_t>(places_->offsets_bytes[value]);
    case ValuePlace::Kind::kConstant:
      return reinterpret_cast<std::uint64_t>(constants_[place.index].data());
    case ValuePlace::Kind::kNowhere:
      break;
  }
  return 0;
}

void ScheduledResident::write_addresses(std::size_t launch) noexcept {
  for (SizedKernel& one : tiled_->kernels[launch]) {
    for (const BlockAddress& word : one.addresses) {
      const std::uint64_t address =
          address_of(word.value) + static_cast<std::uint64_t>(word.value_offset_bytes);
      std::memcpy(one.block.data() + word.offset_bytes, &address, sizeof address);
    }
  }
}

void ScheduledResident::launch_kernels(std::size_t launch) {
  const std::uint64_t begin_ns = times_ == nullptr ? 0 : now_ns();
  std::vector<SizedKernel>& kernels = tiled_->kernels[launch];
  for (std::size_t kernel = 0; kernel < kernels.size(); ++kernel) {
    SizedKernel& one = kernels[kernel];
    if (one.n_blocks == 0) continue;
    const Error error = runtime().launch_with_host_arguments(
        program_.launches[launch].functions[kernel], one.n_blocks, stream(), nullptr,
        one.block.data(), one.block.size(), one.own_addresses.data(), one.own_addresses.size());
    if (error != kSuccess) runtime().fail(error, "launching " + told(launch));
  }
  if (times_ == nullptr) return;
  times_->begin_ns[launch] = begin_ns;
  times_->end_ns[launch] = now_ns();
  times_->clock_reads += 2;
}

std::string ScheduledResident::told(std::size_t launch) const {
  std::string text = program_.launches[launch].name + " at ";
  for (std::size_t dim = 0; dim < tiled_->sizes.size(); ++dim) {
    if (dim != 0) text += ", ";
    text += (dim < program_.dims.size() ? program_.dims[dim] : "size") + " = " +
            std::to_string(tiled_->sizes[dim]);
  }
  return text;
}

void ScheduledResident::refuse(std::size_t launch, const std::string& why) const {
  throw ExecutionError(told(launch) + ": " + why);
}

void ScheduledResident::release() noexcept {
  stages_.close();  // on none of its threads: see Replay::close
  tiled_.reset();
  constants_.clear();
  constants_end_.reset();
  retired_.clear();
}

// The runtime has copied argument blocks; only constants are still read.
void ScheduledResident::abandon() noexcept {
  static_cast<void>(new (std::nothrow) std::vector<c10::Storage>(std::move(constants_)));
  static_cast<void>(new (std::nothrow) std::deque<Constants>(std::move(retired_)));
  tiled_.reset();
}

}  // namespace offload::acl
