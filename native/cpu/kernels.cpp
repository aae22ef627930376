// Compiled code in place of launches.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cpu/cpu_resident.hpp"
#include "run/write_count.hpp"

namespace offload {

namespace {

// Runs the launches that a kernel replaces, at the addresses of its Values.
void run_replaced(const CpuReplaced& replaced, const CpuKernel::Addresses& addresses) {
  CpuResident& resident = *replaced.resident;
  std::vector<Patch> patches;
  for (std::size_t at = 0; at < replaced.inputs.size(); ++at) {
    patches.push_back({static_cast<std::uint32_t>(replaced.inputs[at]), addresses[at]});
  }
  resident.patch(patches);
  Submission submission;
  resident.execute(submission, nullptr);
  for (const CpuReplaced::Result& result : replaced.results) {
    resident.copy_out(result.slot, reinterpret_cast<void*>(addresses[result.word]));
  }
}

}  // namespace

void CpuResident::copy_out(std::size_t slot, void* to) noexcept {
  std::memcpy(to, storages_[slot].data(), slots_[slot].size_bytes);
  if (slots_[slot].memory == CpuMemory::kOperator) release(slot);
}

void CpuResident::add_kernel(CpuKernel kernel, std::string name, std::string source,
                             std::vector<std::size_t> releases) {
  for (const CpuKernel::Word& word : kernel.words) static_cast<void>(slots_.at(word.slot));
  if (kernel.sources.size() > kernel.words.size()) {
    throw std::invalid_argument("a kernel of fewer words than sources");
  }
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

void CpuResident::set_packed_weights(std::vector<PackedWeight> weights) {
  if (!stream_) throw std::invalid_argument("packed weights of a stream, of which there is none");
  for (const PackedWeight& one : weights) {
    check_weight(stream_->plan(), one.weight);
    for (const std::size_t launch : one.launches) static_cast<void>(launches_.at(launch));
  }
  packed_weights_ = std::move(weights);
}

// A launch that failed its proof reads the weight itself from then on.
void CpuResident::discard_packed() {
  const auto is_proved = [this](std::size_t launch) {
    return launches_[launch].mode == CpuMode::kKernel;
  };
  try {
    std::vector<std::size_t> discarded;
    for (const PackedWeight& one : packed_weights_) {
      if (std::all_of(one.launches.begin(), one.launches.end(), is_proved)) {
        discarded.push_back(one.weight);
      }
    }
    stream_->discard(discarded);
    discarded_in_ = stream_->generation();
  } catch (const std::bad_alloc&) {  // the execution was right, and the next one tries again
  }
}

std::uint64_t CpuResident::count_writes(const CpuKernel& kernel) const {
  std::uint64_t sum = 0;
  for (const CpuKernel::Source& source : kernel.sources) {
    sum += write_count(source.holders);
    if (source.streamed) sum += stream_->n_reads(*source.streamed);
  }
  return sum;
}

// A discarded weight cannot have been written: nothing is derived from it before it is read again.
std::uint64_t CpuResident::count_requests(const CpuKernel& kernel) const {
  const auto is_discarded = [this](const CpuKernel::Source& source) {
    return source.streamed && stream_->is_discarded(*source.streamed);
  };
  const bool any = std::any_of(kernel.sources.begin(), kernel.sources.end(), is_discarded);
  return any ? kernel.n_requests : n_requests_.load(std::memory_order_relaxed);
}

void CpuResident::prove_kernel(CpuLaunch& launch) const {
  CpuKernel& kernel = *launch.kernel;
  find_addresses(kernel);
  const bool is_proved = kernel.prove(kernel.addresses);
  if (!is_proved) kernel.replaced = kernel.make_replaced();
  launch.mode = is_proved ? CpuMode::kKernel : CpuMode::kReplaced;
}

void CpuResident::run_kernel(CpuLaunch& launch) {
  CpuKernel& kernel = *launch.kernel;
  find_addresses(kernel);
  // Read before the sources: later writes are seen by the next execution.
  const std::uint64_t n_writes = count_writes(kernel);
  const std::uint64_t n_requests = count_requests(kernel);
  if (!kernel.sources.empty() && kernel.n_writes == n_writes && kernel.n_requests == n_requests &&
      std::equal(kernel.places.begin(), kernel.places.end(), kernel.addresses.begin())) {
    return;
  }
  if (launch.mode == CpuMode::kReplaced) {
    run_replaced(*kernel.replaced, kernel.addresses);
  } else {
    static_assert(sizeof(void*) == sizeof(std::uintptr_t));
    kernel.function(reinterpret_cast<void* const*>(kernel.addresses.data()));
  }
  kernel.n_writes = n_writes;
  kernel.n_requests = n_requests;
  std::copy_n(kernel.addresses.begin(), kernel.places.size(), kernel.places.begin());
}

}  // namespace offload
