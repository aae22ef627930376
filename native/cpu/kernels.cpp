// Compiled code in the place of launches.
#include <ATen/Parallel.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/cpu_resident.hpp"
#include "replay/write_count.hpp"

namespace offload {
namespace {

std::uint64_t count_writes(const CpuKernel::Sources& sources) noexcept {
  std::uint64_t sum = 0;
  for (const std::vector<at::Tensor>& holders : sources) sum += write_count(holders);
  return sum;
}

}  // namespace

void CpuResident::add_kernel(CpuKernel kernel, std::string name, std::string source,
                             std::vector<std::size_t> releases) {
  for (const CpuKernel::Word& word : kernel.words) static_cast<void>(slots_.at(word.slot));
  if (kernel.sources.size() > kernel.words.size()) {
    throw std::invalid_argument("a kernel of fewer words than sources");
  }
  has_kernels_ = true;
  kernel.addresses.resize(kernel.words.size());
  kernel.places.resize(kernel.sources.size());
  CpuLaunch launch;
  launch.operator_name = std::move(name);
  launch.source = std::move(source);
  launch.kernel = std::move(kernel);
  launch.releases = std::move(releases);
  launch.mode = CpuMode::kUnproved;
  launches_.push_back(std::move(launch));
}

void CpuResident::find_addresses(CpuKernel& kernel) const {
  for (std::size_t index = 0; index < kernel.words.size(); ++index) {
    const CpuKernel::Word& word = kernel.words[index];
    const void* const base = storages_[word.slot].unsafeGetStorageImpl()->data();
    kernel.addresses[index] =
        reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(word.offset_bytes);
  }
}

// Kernels ask OpenMP how many threads they have. Torch tells it in each thread that has run an
// operator, and in others when it is asked.
void CpuResident::take_threads() const {
  if (has_kernels_) static_cast<void>(at::get_num_threads());
}

void CpuResident::run_kernel(CpuLaunch& launch) {
  CpuKernel& kernel = *launch.kernel;
  find_addresses(kernel);
  // Asked before the sources are read: what is written meanwhile is seen by the next execution.
  const std::uint64_t n_writes = count_writes(kernel.sources);
  const std::uint64_t n_requests =
      n_requests_.load(std::memory_order_relaxed) + (stream_ ? stream_->generation() : 0);
  if (!kernel.sources.empty() && kernel.n_writes == n_writes && kernel.n_requests == n_requests &&
      std::equal(kernel.places.begin(), kernel.places.end(), kernel.addresses.begin())) {
    return;
  }
  if (launch.mode == CpuMode::kReplaced) {
    kernel.run_replaced(kernel.addresses);
  } else {
    static_assert(sizeof(void*) == sizeof(std::uintptr_t));
    kernel.function(reinterpret_cast<void* const*>(kernel.addresses.data()));
  }
  kernel.n_writes = n_writes;
  kernel.n_requests = n_requests;
  std::copy_n(kernel.addresses.begin(), kernel.places.size(), kernel.places.begin());
}

}  // namespace offload
