// Spinning for a short while before sleeping, for what another thread is about to do.
#pragma once

#include <chrono>
#include <thread>

namespace offload {

// A hand-off to a spinning thread takes 0.1 us, to a sleeping thread 10 us.
constexpr auto kLookFor = std::chrono::microseconds(50);

// Polls `is_so` for up to kLookFor, yielding to other threads. Returns whether it became true.
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
