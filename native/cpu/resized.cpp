// A resident whose sizes vary: its tensors and numbers take other sizes in place.
#include <iterator>
#include <stdexcept>

#include "cpu/cpu_resident.hpp"
#include "run/varying_numbers.hpp"

namespace offload {
namespace {

// A number that stands for a tensor has its own memory, which no other owner uses.
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

}  // namespace

void check_sizes(const CpuSizes& sizes, const std::vector<CpuLaunch>& launches,
                 const std::vector<std::size_t>& n_axes, std::size_t n_slots) {
  const auto check_slot = [&](std::size_t slot) {
    if (slot >= n_slots) throw std::out_of_range("there is no such slot");
  };
  for (const CpuSizes::View& view : sizes.views) {
    check_numbers(view.numbers, view.varying, n_axes.at(view.tensor));
  }
  for (const CpuSizes::Made& made : sizes.made) {
    const CpuMade& one = launches.at(made.launch).made.at(made.index);
    check_numbers(made.varying, one.layout.shape.size());
  }
  for (const CpuSizes::Scalar& scalar : sizes.scalars) {
    check_scalar(launches.at(scalar.launch).arguments.at(scalar.argument), scalar.item);
  }
  for (const std::vector<CpuSizes::Slot>* const slots : {&sizes.slots, &sizes.constants}) {
    for (const CpuSizes::Slot& one : *slots) check_slot(one.slot);
  }
  if (sizes.feature_map) check_slot(*sizes.feature_map);
}

void CpuResident::set_sizes(CpuSizes sizes) {
  if (stream_) throw std::invalid_argument("sizes vary, and weights are streamed");
  for (const CpuLaunch& launch : launches_) {
    if (launch.kernel) throw std::invalid_argument("sizes vary of compiled code");
  }
  std::vector<std::size_t> n_axes;
  for (const at::Tensor& tensor : tensors_) n_axes.push_back(tensor.sizes().size());
  check_sizes(sizes, launches_, n_axes, slots_.size());
  sizes_ = std::move(sizes);
}

void CpuResident::check(const SizedProgram& sizes) const {
  std::vector<std::int64_t> numbers;
  for (const CpuSizes::View& view : sizes_->views) {
    numbers.assign(view.numbers.begin(), view.numbers.end());
    set_numbers(numbers, view.varying, sizes);
    check_reach(numbers, static_cast<std::int64_t>(tensors_[view.tensor].element_size()),
                sizes.values_bytes.at(view.value));
  }
  check_rooms(sizes);
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
        c10::DataPtr(sizes.constants[index].mutable_data(), c10::Device(c10::kCPU)));
  }
  if (!sizes_->feature_map) return;
  slots_[*sizes_->feature_map].size_bytes = sizes.places->feature_map_bytes;
  storages_[*sizes_->feature_map].set_nbytes(sizes.places->feature_map_bytes);
}

void CpuResident::resize(const SizedProgram& sizes) {
  const bool moves = places_ != sizes.places;
  proof_ = {};  // of the previous execution
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
    CpuMade& result = launches_[made.launch].made[made.index];
    set_layout(result.layout, result.offset_bytes, made.varying, sizes);
  }
  for (const CpuSizes::Scalar& scalar : sizes_->scalars) {
    CpuLaunch& launch = launches_[scalar.launch];
    const Number& number = sizes.numbers[scalar.expression];
    set_scalar(launch.arguments, scalar, number);
    if (!launch.out_stack.empty()) set_scalar(launch.out_stack, scalar, number);
  }
  places_ = sizes.places;  // last: a change that fails halfway is repeated
}

// Kernels may take other paths where tensors are much larger or smaller.
void CpuResident::take_proofs_of(const SizedPlaces& places) {
  const auto found = proved_modes_.find(places.number);
  proved_ = found != proved_modes_.end();
  for (std::size_t index = 0; index < launches_.size(); ++index) {
    CpuLaunch& launch = launches_[index];
    if (launch.has_out) launch.mode = proved_ ? found->second.modes[index] : CpuMode::kUnproved;
  }
}

void CpuResident::keep_proofs() {
  // Places for a single choice of sizes are destroyed with it.
  for (auto one = proved_modes_.begin(); one != proved_modes_.end();) {
    one = one->second.places.expired() ? proved_modes_.erase(one) : std::next(one);
  }
  auto& [places, modes] = proved_modes_[places_->number];
  places = places_;
  modes.clear();
  for (const CpuLaunch& launch : launches_) modes.push_back(launch.mode);
}

}  // namespace offload
