// A program whose launches the host delivers one by one, as torch's operators, on any device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/cpu_resident.hpp"
#include "device/stream_order.hpp"
#include "dispatch/torch_streams.hpp"
#include "offload/resident.hpp"

namespace offload {

// Calls the recorded operators from C++, in program order, on the device of its tensors. Launches
// are described as those of the CPU's resident, and executed differently:
//
// - Operators allocate their results from torch's allocator of the device. Later launches receive
//   views of the result's own storage, since storages of torch_npu know their memory layout.
//   Nothing is placed.
// - A launch receives tensors made for it, and only storages without another owner change: work in
//   a device's queue is not affected by the next execution.
// - Where the device has streams, launches go to torch's current stream of the calling thread, and
//   an execution ends with that stream's work.
//
// Owner, errors: as Resident. Thread: as Resident; the state for delivering launches (KernelScope,
// the current device) is set inside. Nothing is proved: an execution does what eager mode does.
class DispatchedResident final : public Resident, public DeviceStreams, public SizeChanges {
 public:
  // `held`: by slot, tensors whose storages launches receive unchanged; of slots that are kept.
  // `device`: with an index, or the CPU, which has no streams.
  DispatchedResident(std::vector<CpuSlot> slots, std::vector<CpuTensor> tensors, c10::Device device,
                     const std::vector<std::pair<std::size_t, at::Tensor>>& held);
  ~DispatchedResident() override { close(); }

  // Stands for a tensor in the arguments of a launch, by its position in the constructor's list.
  const at::Tensor& tensor(std::size_t index) const { return stand_ins_.at(index); }

  // As CpuResident; out-variants and gathered tables are not supported.
  void add(CpuLaunch launch);
  void set_sizes(CpuSizes sizes);

  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launches_.size(); }
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  bool delivers_launches() const override { return true; }
  c10::Storage take(std::size_t slot) override;
  DeviceStreams* device_streams() override { return order_ ? this : nullptr; }
  SizeChanges* size_changes() override { return sizes_ ? this : nullptr; }
  void close() noexcept override;

  void set_stream(std::uint64_t) override;
  bool follows_torch() const override { return true; }
  std::optional<c10::Stream> torch_stream() const override;
  bool copy(std::uint64_t, std::uint64_t, std::size_t) override { return false; }
  std::unique_ptr<Fence> fence() override { return order_->fence(); }

  void check(const SizedProgram& sizes) const override;
  void resize(const SizedProgram& sizes) override;

 private:
  // An argument that is a tensor, or a list of tensors: the position of each item's tensor; none
  // for items passed as recorded.
  struct Argument {
    std::size_t position = 0;
    std::vector<std::optional<std::size_t>> tensors;
  };

  // Size constants of the executions that a device has made.
  struct Constants {
    std::optional<c10::Stream> stream;  // on which it was made
    std::shared_ptr<Fence> end;         // null once waited for
    bool is_used_elsewhere = false;     // on another stream
  };

  void dispatch(std::size_t launch);
  void find_tensors(const CpuLaunch& launch);
  c10::IValue given(const Argument& argument, const c10::IValue& recorded);
  at::Tensor tensor_at(std::size_t index);
  const c10::Storage& storage_of(std::size_t slot);
  void keep(std::size_t index, const at::Tensor& result, const CpuMade& made);
  bool outlives(const c10::Storage& storage, std::size_t index) const;
  c10::Storage copied(const c10::Storage& storage, std::size_t size_bytes) const;
  void take_constants(const SizedProgram& sizes);
  void meet_constants();
  void leave_constants() noexcept;
  [[noreturn]] void fail(std::size_t launch);

  std::vector<CpuSlot> slots_;
  std::vector<c10::Storage> storages_;    // by slot; null while empty
  std::vector<bool> needs_description_;   // by slot: the storage does not know its layout yet
  std::vector<std::uint64_t> addresses_;  // by slot that is patched
  std::vector<CpuTensor> tensors_;
  std::vector<at::Tensor> stand_ins_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> positions_;  // of stand-ins
  std::vector<CpuLaunch> launches_;
  std::vector<std::vector<Argument>> arguments_;  // by launch
  std::vector<c10::IValue> stack_;
  c10::Device device_;
  std::optional<StreamOrder<TorchStreams>> order_;
  std::optional<CpuSizes> sizes_;
  Constants constants_;
};

}  // namespace offload
