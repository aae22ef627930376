// Looking for what another thread is about to do, before sleeping until it has.
#pragma once

#include <chrono>
#include <thread>

namespace offload {

// A hand-off to a thread that looks takes a tenth of a microsecond, to a sleeping one ten.
constexpr auto kLookFor = std::chrono::microseconds(50);

// Asks until something is so, for that long; whether it is. Gives way to other threads meanwhile.
template <typename IsSo>
bool look_for(IsSo is_so) {
  const auto until = std::chrono::steady_clock::now() + kLookFor;
  while (!is_so()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace offload
