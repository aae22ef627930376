// A resident whose sizes vary: its tensors and numbers become those of other sizes in place.
#include <algorithm>
#include <stdexcept>

#include "cpu/cpu_resident.hpp"

namespace offload {
namespace {

// Bytes from the first element to one past the last.
std::int64_t span_bytes(const std::vector<std::int64_t>& numbers, std::int64_t item_bytes) {
  const std::size_t n_axes = numbers.size() / 2;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < n_axes; ++axis) {
    if (numbers[axis] == 0) return 0;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(numbers[axis] - 1, numbers[n_axes + axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      throw ExpressionError("a tensor leaves 64 bits");
    }
  }
  std::int64_t n_bytes = 0;
  if (__builtin_mul_overflow(last + 1, item_bytes, &n_bytes)) {
    throw ExpressionError("a tensor leaves 64 bits");
  }
  return n_bytes;
}

void set_numbers(std::vector<std::int64_t>& numbers, const std::vector<VaryingNumber>& varying,
                 const SizedProgram& sizes) {
  for (const auto& [position, expression] : varying) {
    numbers[position] = sizes.numbers[expression].integer;
  }
}

void check_numbers(const std::vector<VaryingNumber>& varying, std::size_t n_numbers) {
  for (const VaryingNumber& one : varying) {
    if (one.position >= n_numbers) throw std::invalid_argument("a view has no such number");
  }
}

bool is_empty(const std::vector<std::int64_t>& numbers) {
  const auto end_of_sizes = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  return std::find(numbers.begin(), end_of_sizes, 0) != end_of_sizes;
}

// A number that stands for a tensor has memory of its own, which nobody else sees.
void set_number(const c10::IValue& wrapped, const Number& number) {
  const at::Tensor& tensor = wrapped.toTensor();
  if (number.is_real) {
    *tensor.mutable_data_ptr<double>() = number.real;
  } else {
    *tensor.mutable_data_ptr<std::int64_t>() = number.integer;
  }
}

void set_scalar(std::vector<c10::IValue>& arguments, const CpuSizes::Scalar& scalar,
                const Number& number) {
  c10::IValue& argument = arguments[scalar.argument];
  const c10::IValue value = number.is_real ? c10::IValue(number.real) : c10::IValue(number.integer);
  if (scalar.item) {
    argument.toList().set(*scalar.item, value);
  } else if (argument.isTensor()) {
    set_number(argument, number);
  } else {
    argument = value;
  }
}

void check_scalar(const CpuLaunch& launch, const CpuSizes::Scalar& scalar) {
  const c10::IValue& argument = launch.arguments.at(scalar.argument);
  const auto is_number = [](const c10::IValue& value) { return value.isInt() || value.isDouble(); };
  const auto is_wrapped = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  };
  const bool fits = scalar.item ? argument.isList() && *scalar.item < argument.toList().size() &&
                                      is_number(argument.toList().get(*scalar.item))
                                : is_number(argument) || is_wrapped(argument);
  if (!fits) throw std::invalid_argument("a launch has no number where one is to vary");
}

}  // namespace

void CpuResident::set_sizes(CpuSizes sizes) {
  if (stream_) throw std::invalid_argument("sizes vary, and weights are streamed");
  for (const CpuLaunch& launch : launches_) {
    if (launch.kernel) throw std::invalid_argument("sizes vary of compiled code");
  }
  for (const CpuSizes::View& view : sizes.views) {
    if (view.numbers.size() != 2 * tensors_.at(view.tensor).sizes().size() + 1) {
      throw std::invalid_argument("a view has other numbers than its tensor");
    }
    check_numbers(view.varying, view.numbers.size());
  }
  for (const CpuSizes::Made& made : sizes.made) {
    const CpuMade& one = launches_.at(made.launch).made.at(made.index);
    check_numbers(made.varying, 2 * one.layout.shape.size() + 1);
  }
  for (const CpuSizes::Scalar& scalar : sizes.scalars) {
    check_scalar(launches_.at(scalar.launch), scalar);
  }
  for (const std::vector<CpuSizes::Slot>* const slots : {&sizes.slots, &sizes.constants}) {
    for (const CpuSizes::Slot& one : *slots) static_cast<void>(slots_.at(one.slot));
  }
  if (sizes.feature_map) static_cast<void>(slots_.at(*sizes.feature_map));
  sizes_ = std::move(sizes);
}

void CpuResident::check(const SizedProgram& sizes) const {
  std::vector<std::int64_t> numbers;
  for (const CpuSizes::View& view : sizes_->views) {
    numbers.assign(view.numbers.begin(), view.numbers.end());
    set_numbers(numbers, view.varying, sizes);
    for (const std::int64_t number : numbers) {
      if (number < 0) throw ExpressionError("a size, a stride or an offset is below 0");
    }
    const auto item_bytes = static_cast<std::int64_t>(tensors_[view.tensor].element_size());
    const std::int64_t n_bytes = span_bytes(numbers, item_bytes);
    const auto room_bytes = static_cast<std::int64_t>(sizes.values_bytes.at(view.value));
    if (n_bytes != 0 && numbers.back() > room_bytes - n_bytes) {
      throw ExpressionError("a tensor reaches beyond its memory");
    }
    if (numbers.back() % item_bytes != 0) throw ExpressionError("a tensor begins in an element");
  }
  const SizedPlaces& places = *sizes.places;
  for (std::size_t value = 0; value < sizes.values_bytes.size(); ++value) {
    if (sizes.values_bytes[value] > places.rooms_bytes.at(value)) {
      throw ExpressionError("a value is larger than the room that it was given");
    }
  }
}

void CpuResident::resize_slots(const SizedProgram& sizes) {
  for (const auto& [slot, value] : sizes_->slots) {
    slots_[slot].size_bytes = sizes.values_bytes[value];
    storages_[slot].set_nbytes(sizes.values_bytes[value]);
  }
  for (std::size_t index = 0; index < sizes_->constants.size(); ++index) {
    const auto& [slot, value] = sizes_->constants[index];
    storages_[slot].set_nbytes(sizes.values_bytes[value]);
    storages_[slot].unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(sizes.constants[index].get(), c10::Device(c10::kCPU)));
  }
  if (!sizes_->feature_map) return;
  slots_[*sizes_->feature_map].size_bytes = sizes.places->feature_map_bytes;
  storages_[*sizes_->feature_map].set_nbytes(sizes.places->feature_map_bytes);
}

void CpuResident::resize(const SizedProgram& sizes) {
  const bool moves = places_ != sizes.places;
  proof_ = {};  // of the execution before
  if (moves) take_proofs_of(*sizes.places);
  resize_slots(sizes);
  for (CpuSizes::View& view : sizes_->views) {
    if (!moves && view.varying.empty()) continue;
    set_numbers(view.numbers, view.varying, sizes);
    const at::Tensor& tensor = tensors_[view.tensor];
    const std::size_t n_axes = view.numbers.size() / 2;
    const std::int64_t offset_bytes = is_empty(view.numbers) ? 0 : view.numbers.back();
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        c10::IntArrayRef(view.numbers.data(), n_axes),
        c10::IntArrayRef(view.numbers.data() + n_axes, n_axes),
        (offset_bytes + sizes.places->offsets_bytes[view.value]) /
            static_cast<std::int64_t>(tensor.element_size()));
  }
  for (const CpuSizes::Made& made : sizes_->made) {
    auto& [position, slot, offset_bytes, layout] = launches_[made.launch].made[made.index];
    const std::size_t n_axes = layout.shape.size();
    for (const auto& [at, expression] : made.varying) {
      const std::int64_t number = sizes.numbers[expression].integer;
      (at < n_axes       ? layout.shape[at]
       : at < 2 * n_axes ? layout.strides[at - n_axes]
                         : offset_bytes) = number;
    }
  }
  for (const CpuSizes::Scalar& scalar : sizes_->scalars) {
    CpuLaunch& launch = launches_[scalar.launch];
    const Number& number = sizes.numbers[scalar.expression];
    set_scalar(launch.arguments, scalar, number);
    if (!launch.out_stack.empty()) set_scalar(launch.out_stack, scalar, number);
  }
  places_ = sizes.places;  // last: what fails halfway is done anew
}

// Kernels may go other ways where tensors are much larger or smaller.
void CpuResident::take_proofs_of(const SizedPlaces& places) {
  const auto found = proved_modes_.find(places.number);
  proved_ = found != proved_modes_.end();
  for (std::size_t index = 0; index < launches_.size(); ++index) {
    CpuLaunch& launch = launches_[index];
    if (launch.has_out) launch.mode = proved_ ? found->second.modes[index] : CpuMode::kUnproved;
  }
}

void CpuResident::keep_proofs() {
  // Places of one choice of sizes alone go with it.
  std::erase_if(proved_modes_, [](const auto& one) { return one.second.places.expired(); });
  auto& [places, modes] = proved_modes_[places_->number];
  places = places_;
  modes.clear();
  for (const CpuLaunch& launch : launches_) modes.push_back(launch.mode);
}

}  // namespace offload
