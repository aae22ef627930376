#include "replay/replay.hpp"

#include <ATen/ops/copy.h>
#include <c10/core/Allocator.h>

#include <chrono>

#include "offload/errors.hpp"
#include "offload/lease.hpp"
#include "replay/kernel_scope.hpp"

namespace offload {

std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

namespace {

std::uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::uint64_t>(tensor.const_data_ptr());
}

// True while it lives: a launch may run Python, which may call back.
class Running {
 public:
  explicit Running(bool& flag) : flag_(flag) { flag_ = true; }
  ~Running() { flag_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  bool& flag_;
};

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

Replay::Replay(CallSpec spec, std::vector<Trigger> triggers, std::shared_ptr<Resident> resident)
    : spec_(std::move(spec)),
      resident_(std::move(resident)),
      header_(std::move(triggers), resident_->relocations()) {
  rebind_weights();
}

void Replay::execute(const std::shared_ptr<Call>& call) {
  if (lane_.idle()) {
    run(*call);
  } else {
    submit(call)->wait();
  }
}

std::shared_ptr<Ticket> Replay::submit(const std::shared_ptr<Call>& call) {
  if (closed_) throw ExecutionError("the executable is closed");
  auto ticket = std::make_shared<Ticket>();
  try {
    lane_.submit([self = shared_from_this(), call] { self->run(*call); }, ticket);
  } catch (const std::logic_error&) {
    throw ExecutionError("the executable is closed, or the interpreter is exiting");
  }
  return ticket;
}

void Replay::check_weights() const {
  for (const WeightSpec& weight : spec_.weights) {
    for (const at::Tensor& holder : weight.holders) {
      if (holder.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() !=
              weight.storage.unsafeGetStorageImpl() ||
          weight.storage.nbytes() < weight.size_bytes) {
        throw BindingError(weight.name +
                           ": its storage was swapped since it was bound (param.data = ...); call "
                           "run.rebind_weights() to use the new one");
      }
    }
  }
}

void Replay::rebind_weights() {
  const std::lock_guard lock(lane_.execution_mutex());
  for (const WeightSpec& weight : spec_.weights) {
    for (std::size_t index = 0; index < weight.holders.size(); ++index) {
      const at::Tensor& holder = weight.holders[index];
      const TensorLayout& layout = weight.layouts[index];
      if (holder.scalar_type() != layout.dtype ||
          holder.sizes() != c10::IntArrayRef(layout.shape) ||
          holder.strides() != c10::IntArrayRef(layout.strides) ||
          holder.storage_offset() != weight.offsets[index] ||
          holder.storage().nbytes() < weight.size_bytes) {
        throw BindingError(
            weight.name +
            ": it has another shape, dtype, strides, offset or size than when it was "
            "recorded; give it a tensor laid out alike, or capture again");
      }
      if (holder.storage().unsafeGetStorageImpl() !=
          weight.holders.front().storage().unsafeGetStorageImpl()) {
        throw BindingError(weight.name +
                           ": several tensors shared its storage when recorded and no longer do; "
                           "tie them again, or capture again");
      }
    }
  }
  for (WeightSpec& weight : spec_.weights) weight.storage = weight.holders.front().storage();
}

std::uint64_t Replay::feature_map_address(const Call& call) {
  if (spec_.feature_map_bytes == 0) return 0;
  if (call.feature_map.defined()) return address_of(call.feature_map);
  if (!arena_) arena_ = allocate(spec_.device, spec_.feature_map_bytes, "the feature map");
  return reinterpret_cast<std::uint64_t>(arena_.get());
}

void Replay::bind(const Call& call) {
  for (std::size_t index = 0; index < spec_.inputs.size(); ++index) {
    header_.bind(spec_.inputs[index].slot, address_of(call.bound_inputs[index]));
  }
  for (std::size_t index = 0; index < spec_.outputs.size(); ++index) {
    if (!spec_.outputs[index].operator_allocated) {
      header_.bind(spec_.outputs[index].slot, call.output_addresses[index]);
    }
  }
  for (const WeightSpec& weight : spec_.weights) {
    header_.bind(weight.slot, reinterpret_cast<std::uint64_t>(weight.storage.data()));
  }
  header_.bind(spec_.feature_map_slot, feature_map_address(call));
}

void Replay::run(Call& call) {
  const std::lock_guard lock(lane_.execution_mutex());
  if (running_) throw ExecutionError("a launch of this executable executes the executable itself");
  const Running running(running_);
  if (released_) throw ExecutionError("the executable is closed");
  check_weights();
  const KernelScope scope;
  const std::uint64_t begin_ns = now_ns();
  for (const Copy& copy : call.copies_in) const_cast<at::Tensor&>(copy.to).copy_(copy.from);
  bind(call);
  const std::uint64_t bound_ns = now_ns();
  const Policy policy = header_.policy();
  const std::uint64_t decided_ns = now_ns();
  LastExecution execution;
  if (policy != Policy::kNone) resident_->patch(header_.refresh(execution.counts));
  const std::uint64_t patched_ns = now_ns();
  std::uint64_t first_launch_ns = patched_ns;
  {
    const std::uint64_t shared = call.feature_map.defined() ? address_of(call.feature_map) : 0;
    const Lease lease(shared, shared == 0 ? 0 : shared + spec_.feature_map_bytes);
    resident_->execute(first_launch_ns);
  }
  const std::uint64_t end_ns = now_ns();
  for (std::size_t index = 0; index < spec_.outputs.size(); ++index) {
    const OutputSpec& output = spec_.outputs[index];
    if (!output.operator_allocated) continue;
    call.outputs[index] =
        c10::Storage(c10::Storage::use_byte_size_t(), output.size_bytes,
                     resident_->take(output.slot), c10::GetAllocator(spec_.device.type()), true);
  }
  for (const std::size_t index : call.copied_results) {
    const ResultSpec& result = spec_.results[index];
    call.given_results[index].copy_(
        tensor_on(call.outputs[result.index], result.offset_bytes, result.layout, spec_.device));
  }
  for (const Copy& copy : call.copies_back) const_cast<at::Tensor&>(copy.to).copy_(copy.from);
  for (std::size_t index = 0; index < spec_.inputs.size(); ++index) {
    if (spec_.inputs[index].written) bump_version(call.inputs[index]);
  }
  for (const WeightSpec& weight : spec_.weights) {
    if (weight.written) bump_version(weight.holders.front());
  }
  for (const at::Tensor& given : call.given_results) {
    if (given.defined()) bump_version(given);
  }
  execution.convert_ns = call.convert_ns + bound_ns - begin_ns;
  execution.policy_ns = decided_ns - bound_ns;
  execution.patch_ns = patched_ns - decided_ns;
  execution.submit_ns = first_launch_ns - patched_ns;
  execution.device_ns = end_ns - first_launch_ns;
  execution.counts.policy = policy;
  execution.bytes_copied = call.bytes_copied;
  const std::lock_guard last_lock(last_mutex_);
  execution.n_executions = last_.n_executions + 1;
  last_ = execution;
}

LastExecution Replay::last_execution() const {
  const std::lock_guard lock(last_mutex_);
  return last_;
}

void Replay::close() noexcept {
  const std::lock_guard close_lock(close_mutex_);  // a second caller waits as the first does
  closed_ = true;
  lane_.close();
  const std::lock_guard lock(lane_.execution_mutex());
  released_ = true;
  arena_.clear();
}

}  // namespace offload
