// Locations of addresses, for copies.
#pragma once

#include "runtime.hpp"

namespace simulated_ascend {

enum class Place { kDevice, kPinned, kPageable };

// Returns where an address lies. Host memory that was not allocated or registered here is pageable.
Place place_of(const Runtime& state, std::uint64_t address);

}  // namespace simulated_ascend
