// Memory that a resident keeps while it is loaded.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace offload {

// Whole pages, huge if available; freed with the pointer. Throws OutOfMemory.
c10::DataPtr kept_memory(std::size_t size_bytes);

}  // namespace offload
