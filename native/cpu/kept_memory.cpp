#include "cpu/kept_memory.hpp"

#include <sys/mman.h>

#include <memory>
#include <string>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload {
namespace {

struct Mapped {
  std::byte* begin;
  std::size_t size_bytes;
};

void unmap(void* context) {
  const std::unique_ptr<Mapped> mapped(static_cast<Mapped*>(context));
  munmap(mapped->begin, mapped->size_bytes);
}

}  // namespace

c10::DataPtr kept_memory(std::size_t size_bytes) {
  auto mapped = std::make_unique<Mapped>(Mapped{nullptr, whole_pages(size_bytes)});
  mapped->begin = map_pages(size_bytes);
  if (mapped->begin == nullptr) {
    throw OutOfMemory("there is no memory for " + std::to_string(size_bytes) +
                      " bytes that are derived from weights");
  }
  void* const begin = mapped->begin;
  return {begin, mapped.release(), &unmap, c10::Device(c10::kCPU)};
}

}  // namespace offload
