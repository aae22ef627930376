// The weights of an executable, held by reference, and whether they still are what was bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "offload/header.hpp"
#include "run/call.hpp"
#include "run/held_storages.hpp"
#include "run/overlaps.hpp"

namespace offload {

// Refuses a weight whose tensors are laid out otherwise than recorded, or lie in several storages:
// BindingError.
void check_laid_out_as_recorded(const WeightSpec& weight);

// Owner: one Replay. Thread: callers serialise. Errors: BindingError naming the weight.
class Weights {
 public:
  // `spec` must outlive this, and its weights not move.
  explicit Weights(CallSpec& spec) : spec_(spec), specs_(spec.weights) {}

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
  // weights whose memory was moved: other processes may write it now, unseen. Torch tells nobody
  // when a tensor is given another storage, so that each is looked at once at each execution, when
  // its memory may have left the caches: what comes soon is asked for meanwhile. Nothing else of an
  // execution looks at each weight.
  //
  // Gives whether all memory is where it was at the latest bind, as a rule: a storage may be given
  // other memory (`share_memory_`).
  bool check() const;

  // Binds where launches find each weight, and notes it: once the storages are others, and where
  // memory has moved.
  void bind(Header& header);

  // Where weights lay at the latest bind.
  const Stretches& memory() const { return memory_; }

 private:
  struct Place {
    std::size_t slot;
    const c10::StorageImpl* storage;
    const void* address;  // at the latest bind
  };

  // What check compares, side by side in memory.
  struct Holder {
    c10::TensorImpl* tensor;
    c10::StorageImpl* storage;
    const void* address;  // at the latest bind
    std::size_t size_bytes;
    caffe2::TypeMeta dtype;
    c10::DispatchKeySet lazy;  // conjugation and negation
    std::uint32_t weight;
    std::uint32_t n_dims;
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

  const CallSpec& spec_;
  std::vector<WeightSpec>& specs_;
  std::vector<Holder> holders_;
  std::vector<Place> places_;  // by weight
  std::vector<Place> moved_;   // of those that launches find elsewhere
  std::vector<Packed> packed_;
  Stretches memory_;
  std::vector<std::int64_t> numbers_;
  std::shared_ptr<const StoragePins> pins_;
};

}  // namespace offload
