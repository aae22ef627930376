// Memory that devices copy to quickly.
#pragma once

#include <cstddef>

namespace offload {

// Whole pages, rounded up.
std::size_t whole_pages(std::size_t size_bytes) noexcept;

// Anonymous memory of whole pages that begins where a huge page can, and is of huge pages where the
// system gives them: direct reads into small ones were slower by a third or more and took
// four times the processor's time (bench/streaming/read_rates.cpp): each page is described to the
// device.
// Null, with errno, where there is none. The caller unmaps it.
std::byte* map_pages(std::size_t size_bytes) noexcept;

}  // namespace offload
