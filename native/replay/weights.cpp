#include "replay/weights.hpp"

#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

constexpr const char* kLaidOutAnew =
    ": it has another shape, dtype, strides, offset or size than when it was recorded; give it a "
    "tensor laid out alike, or capture again";

bool is_laid_out_as_recorded(const WeightSpec& weight, std::size_t index) {
  const at::Tensor& holder = weight.holders[index];
  const TensorLayout& layout = weight.layouts[index];
  return !holder._is_zerotensor() && holder.scalar_type() == layout.dtype &&
         holder.sizes() == c10::IntArrayRef(layout.shape) &&
         holder.strides() == c10::IntArrayRef(layout.strides) &&
         holder.storage_offset() == weight.offsets[index] && holder.is_conj() == layout.conjugate &&
         holder.is_neg() == layout.negative && holder.storage().nbytes() >= weight.size_bytes;
}

// Asks for an object's cache lines.
template <typename Object>
void prefetch(const Object* object) {
  constexpr std::size_t kLineBytes = 64;
  const char* const begin = reinterpret_cast<const char*>(object);
  for (std::size_t at = 0; at < sizeof(Object); at += kLineBytes) __builtin_prefetch(begin + at);
}

}  // namespace

void check_laid_out_as_recorded(const WeightSpec& weight) {
  const c10::StorageImpl* const first = weight.holders.front().storage().unsafeGetStorageImpl();
  for (std::size_t index = 0; index < weight.holders.size(); ++index) {
    if (!is_laid_out_as_recorded(weight, index)) throw BindingError(weight.name + kLaidOutAnew);
    if (weight.holders[index].storage().unsafeGetStorageImpl() != first) {
      throw BindingError(weight.name +
                         ": several tensors shared its storage when recorded and no longer do; "
                         "tie them again, or capture again");
    }
  }
}

Weights::Replaced Weights::rebind() {
  for (const WeightSpec& weight : specs_) check_laid_out_as_recorded(weight);
  Replaced replaced;
  replaced.storages.reserve(specs_.size());
  StoragePins pins;
  pins.reserve(specs_.size());
  for (WeightSpec& weight : specs_) {
    replaced.storages.push_back(std::move(weight.storage));
    weight.storage = weight.holders.front().storage();
    pins.push_back(StoragePin::of(weight.storage));
  }
  replaced.pins = std::exchange(pins_, std::make_shared<const StoragePins>(std::move(pins)));
  flatten();
  return replaced;
}

void Weights::flatten() {
  holders_.clear();
  numbers_.clear();
  places_.clear();
  for (std::size_t weight = 0; weight < specs_.size(); ++weight) {
    const WeightSpec& spec = specs_[weight];
    places_.push_back({spec.slot, spec.place().unsafeGetStorageImpl()});
    for (const at::Tensor& holder : spec.holders) {
      holders_.push_back({holder.unsafeGetTensorImpl(), spec.storage.unsafeGetStorageImpl(),
                          spec.size_bytes, holder.dtype(), holder.is_conj(), holder.is_neg(),
                          weight, static_cast<std::size_t>(holder.dim()), numbers_.size()});
      numbers_.insert(numbers_.end(), holder.sizes().begin(), holder.sizes().end());
      numbers_.insert(numbers_.end(), holder.strides().begin(), holder.strides().end());
      numbers_.push_back(holder.storage_offset());
    }
  }
}

bool Weights::is_as_bound(const Holder& holder) const {
  const std::int64_t* const numbers = numbers_.data() + holder.first_number;
  const c10::IntArrayRef shape(numbers, holder.n_dims);
  const c10::IntArrayRef strides(numbers + holder.n_dims, holder.n_dims);
  return holder.tensor->sizes() == shape && holder.tensor->strides() == strides &&
         holder.tensor->storage_offset() == numbers[2 * holder.n_dims] &&
         holder.tensor->dtype() == holder.dtype && holder.tensor->is_conj() == holder.conjugate &&
         holder.tensor->is_neg() == holder.negative;
}

void Weights::check() const {
  for (const Holder& holder : holders_) {
    prefetch(holder.tensor);
    prefetch(holder.storage);
  }
  for (const Holder& holder : holders_) {
    if (holder.tensor->unsafe_storage().unsafeGetStorageImpl() != holder.storage ||
        holder.storage->nbytes() < holder.size_bytes) {
      throw BindingError(specs_[holder.weight].name +
                         ": its storage was swapped since it was bound (param.data = ...); call "
                         "run.rebind_weights() to use the new one");
    }
    if (!is_as_bound(holder)) throw BindingError(specs_[holder.weight].name + kLaidOutAnew);
  }
}

}  // namespace offload
