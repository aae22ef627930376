#include "run/weights.hpp"

#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {
namespace {

constexpr const char* kLaidOutAnew =
    ": it has another shape, dtype, strides, offset or size than when it was recorded; ";
constexpr const char* kSwapped =
    ": its storage was swapped since it was bound (param.data = ...); ";
constexpr const char* kLayItOut = "give it a tensor of the same layout, or capture again";
constexpr const char* kRebind = "call run.rebind_weights() to use the new one";

// Transformations that torch applies to a tensor's bytes when they are read.
constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

bool is_laid_out_as_recorded(const WeightSpec& weight, std::size_t index) {
  const at::Tensor& holder = weight.holders[index];
  const TensorLayout& layout = weight.layouts[index];
  return !holder._is_zerotensor() && holder.scalar_type() == layout.dtype &&
         holder.sizes() == c10::IntArrayRef(layout.shape) &&
         holder.strides() == c10::IntArrayRef(layout.strides) &&
         holder.storage_offset() == weight.offsets[index] && holder.is_conj() == layout.conjugate &&
         holder.is_neg() == layout.negative && holder.storage().nbytes() >= weight.size_bytes;
}

// For the few numbers of a tensor, where calling memcmp, as std::equal does, takes longer.
bool are_equal(const std::int64_t* one, const std::int64_t* other, std::size_t count) {
  for (std::size_t index = 0; index < count; ++index) {
    if (one[index] != other[index]) return false;
  }
  return true;
}

// Prefetches the cache lines of an object.
template <typename Object>
void prefetch(const Object* object) {
  constexpr std::size_t kLineBytes = 64;
  const char* const begin = reinterpret_cast<const char*>(object);
  for (std::size_t at = 0; at < sizeof(Object); at += kLineBytes) __builtin_prefetch(begin + at);
}

constexpr std::size_t kHoldersAhead = 4;  // a processor has some 10 to 20 lines in flight

}  // namespace

void check_laid_out_as_recorded(const WeightSpec& weight) {
  const c10::StorageImpl* const first = weight.holders.front().storage().unsafeGetStorageImpl();
  for (std::size_t index = 0; index < weight.holders.size(); ++index) {
    if (!is_laid_out_as_recorded(weight, index)) {
      throw BindingError(weight.name + kLaidOutAnew + kLayItOut);
    }
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
  moved_.clear();
  packed_.clear();
  for (std::size_t weight = 0; weight < specs_.size(); ++weight) {
    const WeightSpec& spec = specs_[weight];
    places_.push_back({spec.slot, spec.place().unsafeGetStorageImpl(), nullptr});
    if (spec.packed) {
      const c10::StorageImpl* const storage = spec.storage.unsafeGetStorageImpl();
      packed_.push_back({weight, storage, storage->data()});
    }
    for (const at::Tensor& holder : spec.holders) {
      holders_.push_back({holder.unsafeGetTensorImpl(), spec.storage.unsafeGetStorageImpl(),
                          nullptr, spec.size_bytes, holder.dtype(), holder.key_set() & kLazy,
                          static_cast<std::uint32_t>(weight),
                          static_cast<std::uint32_t>(holder.dim()), numbers_.size()});
      numbers_.insert(numbers_.end(), holder.sizes().begin(), holder.sizes().end());
      numbers_.insert(numbers_.end(), holder.strides().begin(), holder.strides().end());
      numbers_.push_back(holder.storage_offset());
    }
  }
}

bool Weights::is_as_bound(const Holder& holder) const {
  const c10::TensorImpl& tensor = *holder.tensor;
  const std::int64_t* const numbers = numbers_.data() + holder.first_number;
  const c10::IntArrayRef shape = tensor.sizes();
  return shape.size() == holder.n_dims && are_equal(shape.data(), numbers, holder.n_dims) &&
         are_equal(tensor.strides().data(), numbers + holder.n_dims, holder.n_dims) &&
         tensor.storage_offset() == numbers[2 * holder.n_dims] && tensor.dtype() == holder.dtype &&
         (tensor.key_set() & kLazy) == holder.lazy;
}

void Weights::bind(Header& header) {
  moved_.clear();
  for (std::size_t weight = 0; weight < specs_.size(); ++weight) {
    Place& place = places_[weight];
    place.address = place.storage->data();
    header.bind(place.slot, reinterpret_cast<std::uint64_t>(place.address));
    if (specs_[weight].moved.defined()) moved_.push_back(place);
  }
  for (Holder& holder : holders_) holder.address = holder.storage->data();
  memory_ = weight_memory(spec_);
}

void Weights::refuse_swapped(const WeightSpec& swapped) const {
  if (spec_.rebinding_refusal.empty()) {
    for (const WeightSpec& weight : specs_) check_laid_out_as_recorded(weight);  // as rebind does
    throw BindingError(swapped.name + kSwapped + kRebind);
  }
  bool has_layout = true;
  for (std::size_t index = 0; index < swapped.holders.size(); ++index) {
    has_layout &= is_laid_out_as_recorded(swapped, index);
  }
  throw BindingError(swapped.name + (has_layout ? kSwapped : kLaidOutAnew) +
                     spec_.rebinding_refusal);
}

bool Weights::check() const {
  bool stays = true;
  const std::size_t n_holders = holders_.size();
  for (std::size_t index = 0; index < n_holders; ++index) {
    if (index + kHoldersAhead < n_holders) {
      prefetch(holders_[index + kHoldersAhead].tensor);
      prefetch(holders_[index + kHoldersAhead].storage);
    }
    const Holder& holder = holders_[index];
    if (holder.tensor->unsafe_storage().unsafeGetStorageImpl() != holder.storage ||
        holder.storage->nbytes() < holder.size_bytes) [[unlikely]] {
      refuse_swapped(specs_[holder.weight]);
    }
    if (!is_as_bound(holder)) [[unlikely]] {
      const std::string& refusal = spec_.rebinding_refusal;
      throw BindingError(specs_[holder.weight].name + kLaidOutAnew +
                         (refusal.empty() ? kLayItOut : refusal));
    }
    stays &= holder.storage->data() == holder.address;
  }
  for (const Place& place : moved_) stays &= place.storage->data() == place.address;
  for (const Packed& packed : packed_) {
    if (packed.storage->data() == packed.address) continue;
    throw BindingError(specs_[packed.weight].name +
                       ": its memory was moved since it was bound, as share_memory() does, and "
                       "kernels read it packed; load the program again");
  }
  return stays;
}

}  // namespace offload
