// The weights of an executable, held by reference, and whether they still are what was bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "offload/header.hpp"
#include "run/call.hpp"
#include "run/held_storages.hpp"

namespace offload {

// Refuses a weight whose tensors are laid out otherwise than recorded, or lie in several storages:
// BindingError.
void check_laid_out_as_recorded(const WeightSpec& weight);

// Owner: one Replay. Thread: callers serialise. Errors: BindingError naming the weight.
class Weights {
 public:
  // `specs` must outlive this, and not move.
  explicit Weights(std::vector<WeightSpec>& specs) : specs_(specs) {}

  // What is let go, to be dropped where no lock is held: memory of Python's is freed under the GIL.
  struct Replaced {
    std::vector<c10::Storage> storages;
    std::shared_ptr<const StoragePins> pins;
  };

  // Takes the storages that the weights' tensors have now.
  [[nodiscard]] Replaced rebind();

  // Of those storages, for executions that hold them.
  const std::shared_ptr<const StoragePins>& pins() const { return pins_; }

  // Refuses tensors that lie elsewhere, or are laid out anew, since they were bound, and packed
  // weights whose memory was moved: other processes may write it now, unseen. Done at each
  // execution, when their memory has left the caches: all of it is asked for at once.
  void check() const;

  // Binds where launches find each weight.
  void bind(Header& header) const {
    for (const Place& place : places_) {
      header.bind(place.slot, reinterpret_cast<std::uint64_t>(place.storage->data()));
    }
  }

 private:
  struct Place {
    std::size_t slot;
    const c10::StorageImpl* storage;
  };

  // What check compares, side by side in memory.
  struct Holder {
    c10::TensorImpl* tensor;
    c10::StorageImpl* storage;
    std::size_t size_bytes;
    caffe2::TypeMeta dtype;
    c10::DispatchKeySet lazy;  // conjugation and negation
    std::size_t weight;
    std::size_t n_dims;
    std::size_t first_number;  // in numbers_: sizes, strides, offset
  };

  // A weight of which launches read what was derived from it, and where it was then.
  struct Packed {
    std::size_t weight;
    const c10::StorageImpl* storage;
    const void* address;
  };

  bool is_as_bound(const Holder& holder) const;
  void flatten();

  std::vector<WeightSpec>& specs_;
  std::vector<Holder> holders_;
  std::vector<Place> places_;
  std::vector<Packed> packed_;
  std::vector<std::int64_t> numbers_;
  std::shared_ptr<const StoragePins> pins_;
};

}  // namespace offload
