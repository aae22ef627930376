// What a call that was queued keeps as it was bound, while its caller goes on.
#pragma once

#include <memory>

#include "run/call.hpp"
#include "run/held_storages.hpp"

namespace offload {

// Makes a call that was bound independent of what its caller does to the tensor objects (`set_`,
// `.data =`, `resize_` of their shapes): it goes on with tensors of its own on the same storages,
// and hands back the caller's. Gives what keeps the memory there, with that of `weights`.
std::shared_ptr<const HeldStorages> hold(Call& call, std::shared_ptr<const StoragePins> weights);

// Refuses a held call whose memory is not where it was bound: BindingError naming the tensor.
void check_held(const CallSpec& spec, const Call& call);

}  // namespace offload
