// What copies need to know of addresses.
#pragma once

#include "runtime.hpp"

namespace simulated_ascend {

enum class Place { kDevice, kPinned, kPageable };

// Where an address lies. Host memory that nobody allocated or registered here is pageable.
Place place_of(const Runtime& state, std::uint64_t address);

}  // namespace simulated_ascend
