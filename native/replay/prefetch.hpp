// Asking for memory ahead of its use: between executions weights leave the caches.
#pragma once

#include <cstddef>

namespace offload {

// Asks for an object's cache lines.
template <typename Object>
void prefetch(const Object* object) {
  constexpr std::size_t kLineBytes = 64;
  const char* const begin = reinterpret_cast<const char*>(object);
  for (std::size_t at = 0; at < sizeof(Object); at += kLineBytes) __builtin_prefetch(begin + at);
}

}  // namespace offload
