// The weights of an executable, held by reference, and whether they are still as bound.
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

// Throws BindingError for a weight whose tensors are laid out otherwise than recorded, or lie in
// several storages.
void check_laid_out_as_recorded(const WeightSpec& weight);

// Owner: one Replay. Thread: callers serialise. Errors: BindingError naming the weight.
class Weights {
 public:
  // `spec` must outlive this, and its weights must not move.
  explicit Weights(CallSpec& spec) : spec_(spec), specs_(spec.weights) {}

  // What was replaced, to be destroyed without a lock: Python's memory is freed under the GIL.
  struct Replaced {
    std::vector<c10::Storage> storages;
    std::shared_ptr<const StoragePins> pins;
  };

  // Takes the current storages of the weights' tensors.
  [[nodiscard]] Replaced rebind();

  // Pins of those storages, for executions that hold them.
  const std::shared_ptr<const StoragePins>& pins() const { return pins_; }

  // Refuses tensors that have moved or changed their layout since they were bound, and packed
  // weights whose memory was moved, since other processes may now write it unseen. Torch does not
  // report that a tensor was given another storage, so each execution looks at each tensor once,
  // possibly out of cache; those that come next are prefetched. Nothing else of an execution looks
  // at each weight.
  //
  // Returns whether all memory is where it was at the latest bind, which is the usual case: a
  // storage may be given other memory (`share_memory_`).
  bool check() const;

  // Binds the places at which launches find the weights, and records them: after storages were
  // replaced, and after memory has moved.
  void bind(Header& header);

  // The memory of weights at the latest bind.
  const Stretches& memory() const { return memory_; }

 private:
  struct Place {
    std::size_t slot;
    const c10::StorageImpl* storage;
    const void* address;  // at the latest bind
  };

  // What check compares, contiguous in memory.
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

  // A weight from which launches read derived bytes, and its place when they were derived.
  struct Packed {
    std::size_t weight;
    const c10::StorageImpl* storage;
    const void* address;
  };

  // Refuses a weight whose storage was swapped or shrunk; says how to use the new one, if possible.
  [[noreturn]] void refuse_swapped(const WeightSpec& swapped) const;
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
