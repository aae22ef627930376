#include "null/null_resident.hpp"

#include <algorithm>

#include "offload/errors.hpp"

namespace offload {

NullResident::NullResident(std::vector<Relocation> relocations, std::uint64_t word_ns,
                           std::uint64_t submit_ns, std::vector<std::uint64_t> launch_ns)
    : relocations_(std::move(relocations)),
      word_ns_(word_ns),
      submit_ns_(submit_ns),
      launch_ns_(std::move(launch_ns)) {
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

// The times of launches are virtual: consecutive from the time of the call.
void NullResident::execute(Submission& submission, LaunchTimes* times) {
  submission.end_ns = now_ns();
  std::uint64_t at_ns = submission.end_ns;
  clock_ns_ += submit_ns_;
  for (std::size_t launch = 0; launch < launch_ns_.size(); ++launch) {
    clock_ns_ += launch_ns_[launch];
    if (times == nullptr) continue;
    times->begin_ns[launch] = at_ns;
    at_ns += launch_ns_[launch];
    times->end_ns[launch] = at_ns;
  }
}

void NullResident::issue(std::size_t launch) { clock_ns_ += launch_ns_.at(launch); }

c10::Storage NullResident::take(std::size_t) {
  throw ExecutionError("the null device has no operator that allocates memory");
}

}  // namespace offload
