// The clock of all measurements.
#pragma once

#include <cstdint>

namespace offload {

// Nanoseconds of the steady clock.
std::uint64_t now_ns() noexcept;

}  // namespace offload
