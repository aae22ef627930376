// What a queued call keeps as it was bound, while its caller continues.
#pragma once

#include <memory>

#include "run/call.hpp"
#include "run/held_storages.hpp"

namespace offload {

// Makes a bound call independent of what its caller does to the tensor objects (`set_`, `.data =`,
// `resize_` of their shapes): it continues with separate tensor objects on the same storages, and
// returns the caller's. The result keeps that memory, and that of `weights`, in place.
std::shared_ptr<const HeldStorages> hold(Call& call, std::shared_ptr<const StoragePins> weights);

// Throws BindingError, naming the tensor, for a held call whose memory has moved since it was
// bound.
void check_held(const CallSpec& spec, const Call& call);

}  // namespace offload
