#include "run/held_call.hpp"

#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "run/overlaps.hpp"

namespace offload {
namespace {

// A separate tensor object on the same storage, with a shared version counter.
at::Tensor twin_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/true));
}

// Calls `visit` with each of the caller's tensors.
template <typename Visit>
void for_each_held(const Call& call, Visit visit) {
  for (const at::Tensor& input : call.inputs) visit(input);
  for (const at::Tensor& given : call.given_results) visit(given);
  visit(call.feature_map);
}

std::string name_of(const CallSpec& spec, std::size_t index) {
  if (index < spec.inputs.size()) return spec.inputs[index].name;
  index -= spec.inputs.size();
  return index < spec.results.size() ? given_name(index) : "feature_map";
}

}  // namespace

std::shared_ptr<const HeldStorages> hold(Call& call, std::shared_ptr<const StoragePins> weights) {
  call.callers = std::make_unique<CallersTensors>();
  CallersTensors& callers = *call.callers;
  callers.inputs = call.inputs;
  callers.given_results = call.given_results;
  for (at::Tensor& input : call.inputs) input = twin_of(input);
  for (at::Tensor& given : call.given_results) given = twin_of(given);
  call.feature_map = twin_of(call.feature_map);
  const auto use_twin = [&](at::Tensor& used) {
    for (std::size_t index = 0; index < call.inputs.size(); ++index) {
      if (used.is_same(callers.inputs[index])) return void(used = call.inputs[index]);
    }
    for (std::size_t index = 0; index < call.given_results.size(); ++index) {
      const at::Tensor& given = callers.given_results[index];
      if (given.defined() && used.is_same(given)) return void(used = call.given_results[index]);
    }
  };
  for (at::Tensor& input : call.bound_inputs) use_twin(input);
  for (std::vector<Copy>* const copies : {&call.copies_in, &call.copies_out, &call.copies_back}) {
    for (Copy& copy : *copies) {
      use_twin(copy.from);
      use_twin(copy.to);
    }
  }
  StoragePins own;
  for_each_held(call, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return callers.places.push_back({});
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    callers.places.push_back({storage, storage->data(), storage->nbytes()});
    own.push_back(StoragePin::of(tensor.storage()));
  });
  return std::make_shared<const HeldStorages>(Holder::kExecution, std::move(weights),
                                              std::move(own));
}

void check_held(const CallSpec& spec, const Call& call) {
  if (!call.callers) return;
  const std::vector<HeldPlace>& places = call.callers->places;
  for (std::size_t index = 0; index < places.size(); ++index) {
    const HeldPlace& place = places[index];
    if (place.storage == nullptr ||
        (place.storage->data() == place.data && place.storage->nbytes() == place.n_bytes)) {
      continue;
    }
    throw BindingError(name_of(spec, index) +
                       ": its memory was freed or moved between the submission and its execution, "
                       "which has not run; leave it until the ticket is done");
  }
}

}  // namespace offload
