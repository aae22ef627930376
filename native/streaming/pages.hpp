// Memory to which devices copy quickly.
#pragma once

#include <cstddef>

namespace offload {

// `size_bytes` rounded up to whole pages.
std::size_t whole_pages(std::size_t size_bytes) noexcept;

// Maps anonymous memory of whole pages, aligned for huge pages and made of them where the system
// gives them. Direct reads into small pages were slower by a third or more and took four times the
// processor's time (bench/streaming/read_rates.cpp), since each page is described to the device.
// Returns null, with errno, on failure. The caller unmaps it.
std::byte* map_pages(std::size_t size_bytes) noexcept;

}  // namespace offload
