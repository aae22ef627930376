#include "offload/clock.hpp"

#include <chrono>

namespace offload {

std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

}  // namespace offload
