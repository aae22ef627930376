#include "cuda/host_tables.hpp"

namespace offload::cuda {
namespace {

constexpr std::size_t kAlignmentBytes = 256;

std::vector<std::size_t> offsets_of(const std::vector<std::size_t>& size_bytes) {
  std::vector<std::size_t> offsets = {0};
  for (const std::size_t n_bytes : size_bytes) {
    offsets.push_back(offsets.back() + round_up(n_bytes, kAlignmentBytes));
  }
  return offsets;
}

}  // namespace

HostTables::HostTables(const Driver& driver, const std::vector<std::size_t>& size_bytes)
    : driver_(driver),
      offsets_(offsets_of(size_bytes)),
      half_bytes_(offsets_.back()),
      memory_(driver, 2 * half_bytes_),
      event_0_(driver),
      event_1_(driver) {}

void HostTables::turn(const Stream* last_stream) {
  const RelaxedCapture relaxed(driver_);
  const Event events[] = {event_0_.handle(), event_1_.handle()};
  if (last_stream != nullptr) {
    driver_.check(driver_.event_record(events[half_], *last_stream),
                  "recording what reads a host table");
    is_read_[half_] = true;
  }
  const std::size_t other = 1 - half_;
  if (is_read_[other]) {
    driver_.check(driver_.event_synchronize(events[other]), "waiting for what reads a host table");
    is_read_[other] = false;
  }
  half_ = other;
}

}  // namespace offload::cuda
