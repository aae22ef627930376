#include "dispatch/dispatched_resident.hpp"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "offload/errors.hpp"
#include "run/device_storages.hpp"
#include "run/kernel_scope.hpp"
#include "run/operator_calls.hpp"
#include "run/recurrent_call.hpp"
#include "run/thread_count.hpp"
#include "run/varying_numbers.hpp"

namespace offload {
namespace {

TensorLayout layout_of_bytes(std::size_t n_bytes) {
  return {{static_cast<std::int64_t>(n_bytes)}, {1}, c10::ScalarType::Byte};
}

// Memory of another owner.
c10::Storage borrowed(c10::Device device, std::uint64_t address, std::size_t n_bytes) {
  c10::Storage storage =
      make_storage(device, n_bytes, c10::DataPtr(reinterpret_cast<void*>(address), device));
  storage.unsafeGetStorageImpl()->set_resizable(false);
  return storage;
}

bool is_borrowed(const c10::Storage& storage) {
  return storage.data() != nullptr && storage.data_ptr().get_context() == nullptr;
}

bool begins_in(const c10::Storage& storage, const c10::Storage& other) {
  const auto begin = reinterpret_cast<std::uintptr_t>(storage.data());
  const auto other_begin = reinterpret_cast<std::uintptr_t>(other.data());
  return begin >= other_begin && begin - other_begin < other.nbytes();
}

// A varying number in place of a recorded one: a separate object, as the recorded one may still be
// in a device's queue.
c10::IValue varied(const c10::IValue& recorded, const std::optional<std::size_t>& item,
                   const Number& number) {
  const c10::IValue value = number.is_real ? c10::IValue(number.real) : c10::IValue(number.integer);
  if (item) {
    auto list = recorded.toList().copy();
    list.set(*item, value);
    return list;
  }
  if (!recorded.isTensor()) return value;
  const c10::Scalar scalar = number.is_real ? c10::Scalar(number.real) : number.integer;
  at::Tensor wrapped = at::scalar_tensor(scalar, recorded.toTensor().options());
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  return wrapped;
}

}  // namespace

DispatchedResident::DispatchedResident(std::vector<CpuSlot> slots, std::vector<CpuTensor> tensors,
                                       c10::Device device,
                                       const std::vector<std::pair<std::size_t, at::Tensor>>& held)
    : slots_(std::move(slots)),
      storages_(slots_.size()),
      needs_description_(slots_.size()),
      addresses_(slots_.size()),
      tensors_(std::move(tensors)),
      device_(device) {
  for (const auto& [slot, tensor] : held) storages_.at(slot) = tensor.storage();
  for (std::size_t index = 0; index < tensors_.size(); ++index) {
    static_cast<void>(slots_.at(tensors_[index].slot));
    stand_ins_.push_back(at::empty({0}));
    positions_[stand_ins_.back().unsafeGetTensorImpl()] = index;
  }
  if (!device.is_cpu()) order_.emplace(TorchStreams(device));
}

void DispatchedResident::add(CpuLaunch launch) {
  if (launch.has_out || launch.table || launch.kernel) {
    throw std::invalid_argument("launches are dispatched as they were recorded");
  }
  for (const CpuMade& made : launch.made) static_cast<void>(slots_.at(made.slot));
  for (const std::size_t slot : launch.releases) static_cast<void>(slots_.at(slot));
  launch.call = find_operator(launch.operator_name, launch.overload);
  find_tensors(launch);
  launches_.push_back(std::move(launch));
}

void DispatchedResident::find_tensors(const CpuLaunch& launch) {
  std::vector<Argument>& found = arguments_.emplace_back();
  for (std::size_t position = 0; position < launch.arguments.size(); ++position) {
    Argument argument{position, {}};
    for (const at::Tensor& tensor : tensors_on({launch.arguments[position]})) {
      const auto one = positions_.find(tensor.unsafeGetTensorImpl());
      argument.tensors.push_back(one == positions_.end() ? std::nullopt
                                                         : std::optional(one->second));
    }
    const bool is_list = launch.arguments[position].isList();
    // Callees share the lists that they receive. `_unsafe_masked_index` writes its clamped indices
    // into its list argument (torch 2.13, TensorAdvancedIndexing.cpp).
    if (is_list ? launch.arguments[position].isTensorList() ||
                      launch.arguments[position].isOptionalTensorList()
                : argument.tensors.front().has_value()) {
      found.push_back(std::move(argument));
    }
  }
}

void DispatchedResident::set_sizes(CpuSizes sizes) {
  std::vector<std::size_t> n_axes;
  for (const CpuTensor& tensor : tensors_) n_axes.push_back(tensor.layout.shape.size());
  check_sizes(sizes, launches_, n_axes, slots_.size());
  if (sizes.feature_map && slots_[*sizes.feature_map].size_bytes != 0) {
    throw std::invalid_argument("sizes vary, and something is placed");
  }
  sizes_ = std::move(sizes);
}

std::vector<Relocation> DispatchedResident::relocations() const {
  std::vector<Relocation> all;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].memory != CpuMemory::kPatched) continue;
    all.push_back({static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(slot), 0});
  }
  return all;
}

// A storage with another owner, such as a queue of the device, stays unchanged.
void DispatchedResident::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) {
    addresses_[patch.word] = patch.address;
    c10::Storage& storage = storages_[patch.word];
    if (!storage) continue;
    if (storage.use_count() == 1) {
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::DataPtr(reinterpret_cast<void*>(patch.address), device_));
    } else {
      storage = c10::Storage();
    }
  }
}

void DispatchedResident::execute(Submission& submission, LaunchTimes* times) {
  if (device_.is_cpu()) take_threads();
  const KernelScope scope;
  const c10::OptionalDeviceGuard guard(device_.is_cpu() ? std::nullopt : std::optional(device_));
  if (order_) {
    meet_constants();
    order_->note_enqueued();
  }
  submission.end_ns = now_ns();
  std::uint64_t begin_ns = submission.end_ns;
  for (std::size_t launch = 0; launch < launches_.size(); ++launch) {
    dispatch(launch);
    if (times == nullptr) continue;
    times->begin_ns[launch] = begin_ns;
    begin_ns = now_ns();
    times->end_ns[launch] = begin_ns;
    ++times->clock_reads;
  }
}

void DispatchedResident::issue(std::size_t launch) {
  const KernelScope scope;
  const c10::OptionalDeviceGuard guard(device_.is_cpu() ? std::nullopt : std::optional(device_));
  dispatch(launch);
}

void DispatchedResident::dispatch(std::size_t index) {
  const CpuLaunch& launch = launches_[index];
  try {
    stack_.assign(launch.arguments.begin(), launch.arguments.end());
    for (const Argument& argument : arguments_[index]) {
      stack_[argument.position] = given(argument, launch.arguments[argument.position]);
    }
    call_operator(*launch.call, launch.overload, stack_);
    if (launch.guard) {
      check_guard(stack_.at(0), *launch.guard, launch.source, launch.operator_name);
    }
    if (!launch.made.empty()) {
      const std::vector<at::Tensor> results = tensors_on(stack_);
      for (const CpuMade& made : launch.made) keep(index, results.at(made.position), made);
    }
    stack_.clear();
    for (const std::size_t slot : launch.releases) storages_[slot] = c10::Storage();
  } catch (...) {
    fail(index);
  }
}

c10::IValue DispatchedResident::given(const Argument& argument, const c10::IValue& recorded) {
  if (recorded.isTensor()) return tensor_at(*argument.tensors.front());
  if (recorded.isTensorList()) {
    c10::List<at::Tensor> list = recorded.toTensorList().copy();
    for (std::size_t item = 0; item < argument.tensors.size(); ++item) {
      if (argument.tensors[item]) list.set(item, tensor_at(*argument.tensors[item]));
    }
    return list;
  }
  c10::List<std::optional<at::Tensor>> list = recorded.toOptionalTensorList().copy();
  for (std::size_t item = 0; item < argument.tensors.size(); ++item) {
    if (argument.tensors[item]) list.set(item, tensor_at(*argument.tensors[item]));
  }
  return list;
}

at::Tensor DispatchedResident::tensor_at(std::size_t index) {
  const auto& [slot, offset_bytes, layout] = tensors_[index];
  at::Tensor tensor = tensor_on_described(storage_of(slot), offset_bytes, layout, device_);
  if (stand_ins_[index].requires_grad()) tensor.set_requires_grad(true);
  if (needs_description_[slot]) {
    describe_storage(tensor);
    needs_description_[slot] = false;
  }
  return tensor;
}

// Values that begin without content are allocated at their first use.
const c10::Storage& DispatchedResident::storage_of(std::size_t slot) {
  c10::Storage& storage = storages_[slot];
  if (storage) return storage;
  const auto& [size_bytes, memory] = slots_[slot];
  storage = memory == CpuMemory::kPatched
                ? borrowed(device_, addresses_[slot], size_bytes)
                : make_storage(device_, size_bytes, allocate(device_, size_bytes, "a tensor"));
  needs_description_[slot] = true;
  return storage;
}

// Memory that is not torch's, or that of an argument whose slot no launch makes: the launch at
// `index` may have returned its argument. Compared by address, as another storage may have been
// made over it.
bool DispatchedResident::outlives(const c10::Storage& storage, std::size_t index) const {
  if (is_borrowed(storage)) return true;
  for (const Argument& argument : arguments_[index]) {
    for (const std::optional<std::size_t>& tensor : argument.tensors) {
      if (!tensor) continue;
      const std::size_t slot = tensors_[*tensor].slot;
      if (slots_[slot].memory != CpuMemory::kOperator && begins_in(storage, storages_[slot])) {
        return true;
      }
    }
  }
  return false;
}

// A result in memory of an argument that outlives the execution is copied, so that this memory is
// neither handed out nor written.
void DispatchedResident::keep(std::size_t index, const at::Tensor& result, const CpuMade& made) {
  const CpuLaunch& launch = launches_[index];
  const std::size_t size_bytes = slots_[made.slot].size_bytes;
  if (!result.defined() && size_bytes == 0) return;  // some return none for empty
  check_result(result, made.layout, made.offset_bytes, launch.guards_shape,
               launch.source + ": " + launch.operator_name);
  const c10::Storage& storage = result.storage();
  if (storage.nbytes() < size_bytes) {
    throw ExecutionError("returned fewer bytes than recorded");
  }
  storages_[made.slot] = outlives(storage, index) ? copied(storage, size_bytes) : storage;
  needs_description_[made.slot] = false;
}

c10::Storage DispatchedResident::copied(const c10::Storage& storage, std::size_t size_bytes) const {
  c10::Storage own = make_storage(device_, size_bytes, allocate(device_, size_bytes, "a result"));
  const TensorLayout bytes = layout_of_bytes(size_bytes);
  tensor_on(own, 0, bytes, device_).copy_(tensor_on(storage, 0, bytes, device_));
  return own;
}

c10::Storage DispatchedResident::take(std::size_t slot) {
  c10::Storage storage = storage_of(slot);
  if (slots_[slot].memory == CpuMemory::kOperator) storages_[slot] = c10::Storage();
  return storage;
}

void DispatchedResident::set_stream(std::uint64_t) {
  order_->enter(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

std::optional<c10::Stream> DispatchedResident::torch_stream() const {
  return order_ ? order_->stream() : std::nullopt;
}

void DispatchedResident::check(const SizedProgram& sizes) const {
  std::vector<std::int64_t> numbers;
  for (const CpuSizes::View& view : sizes_->views) {
    numbers.assign(view.numbers.begin(), view.numbers.end());
    set_numbers(numbers, view.varying, sizes);
    const auto item_bytes = c10::elementSize(tensors_[view.tensor].layout.dtype);
    check_reach(numbers, static_cast<std::int64_t>(item_bytes), sizes.values_bytes.at(view.value));
  }
  check_rooms(sizes);
}

void DispatchedResident::resize(const SizedProgram& sizes) {
  const KernelScope scope;
  for (const auto& [slot, value] : sizes_->slots) {
    slots_[slot].size_bytes = sizes.values_bytes[value];
    if (slots_[slot].memory == CpuMemory::kPatched) storages_[slot] = c10::Storage();
  }
  take_constants(sizes);
  for (const CpuSizes::View& view : sizes_->views) {
    CpuTensor& tensor = tensors_[view.tensor];
    tensor.offset_bytes = view.numbers.back();
    set_layout(tensor.layout, tensor.offset_bytes, view.varying, sizes);
    const c10::IntArrayRef shape(tensor.layout.shape);
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) tensor.offset_bytes = 0;
  }
  for (const CpuSizes::Made& made : sizes_->made) {
    CpuMade& result = launches_[made.launch].made[made.index];
    set_layout(result.layout, result.offset_bytes, made.varying, sizes);
  }
  for (const CpuSizes::Scalar& scalar : sizes_->scalars) {
    c10::IValue& argument = launches_[scalar.launch].arguments[scalar.argument];
    argument = varied(argument, scalar.item, sizes.numbers[scalar.expression]);
  }
}

void DispatchedResident::take_constants(const SizedProgram& sizes) {
  leave_constants();
  for (std::size_t index = 0; index < sizes_->constants.size(); ++index) {
    const auto& [slot, value] = sizes_->constants[index];
    slots_[slot].size_bytes = sizes.values_bytes[value];
    storages_[slot] = sizes.constants[index];
    needs_description_[slot] = true;
  }
  constants_ = {sizes.constants_stream, sizes.constants_end, false};
}

// They were made on the stream that was current when their sizes first occurred.
void DispatchedResident::meet_constants() {
  if (!constants_.stream || order_->stream() == constants_.stream) return;
  constants_.is_used_elsewhere = true;
  if (!constants_.end) return;
  constants_.end->wait();
  constants_.end = nullptr;
}

// Torch reuses their memory for later work on the stream where they were made, without regard to
// work on other streams.
void DispatchedResident::leave_constants() noexcept {
  if (!constants_.is_used_elsewhere) return;
  try {
    if (const std::unique_ptr<Fence> end = order_->fence()) end->wait();
  } catch (const std::exception&) {  // the device failed, which each later call reports
  }
}

void DispatchedResident::close() noexcept {
  if (order_) static_cast<void>(order_->end());
  for (c10::Storage& storage : storages_) storage = c10::Storage();
  constants_ = {};
}

// Called while a launch's error is being handled: adds which launch it was.
void DispatchedResident::fail(std::size_t launch) {
  stack_.clear();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].memory == CpuMemory::kOperator) storages_[slot] = c10::Storage();
  }
  rethrow_of_launch(launches_[launch].source + ": " + launches_[launch].operator_name);
}

}  // namespace offload
