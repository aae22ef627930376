#include "null/null_resident.hpp"

#include <algorithm>

#include "offload/errors.hpp"

namespace offload {

NullResident::NullResident(std::vector<Relocation> relocations, std::uint64_t word_ns,
                           std::uint64_t execution_ns)
    : relocations_(std::move(relocations)), word_ns_(word_ns), execution_ns_(execution_ns) {
  std::size_t n_words = 0;
  for (const Relocation& relocation : relocations_) {
    n_words = std::max<std::size_t>(n_words, relocation.word + std::size_t{1});
  }
  words_.assign(n_words, Header::kUnbound);
}

void NullResident::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) words_[patch.word] = patch.address;
  clock_ns_ += word_ns_ * patches.size();
}

void NullResident::execute(std::uint64_t& first_launch_ns) {
  first_launch_ns = now_ns();
  clock_ns_ += execution_ns_;
}

c10::DataPtr NullResident::take(std::size_t) {
  throw ExecutionError("the null device has no operator that allocates memory");
}

}  // namespace offload
