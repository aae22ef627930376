// Random numbers of native tests.
#pragma once

#include <cstdint>

namespace offload::test {

// The same on every machine, unlike those of the standard's distributions.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}

  // From 0 up to but excluding `end`.
  std::int64_t below(std::int64_t end) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int64_t>(state_ >> 33) % end;
  }

 private:
  std::uint64_t state_;
};

}  // namespace offload::test
