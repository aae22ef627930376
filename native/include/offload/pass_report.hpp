// What an execution did with streamed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace offload {

// When the transfer of a piece of a weight ran. A transfer under way has the time of the report as
// its end, and appears again in the next report.
struct TransferTime {
  std::string weight;
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint64_t size_bytes = 0;
};

// A launch that waited for weights.
struct WeightWait {
  std::size_t launch = 0;
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
};

// `bytes` are the bytes of the execution's own transfers, including those that ran before it began:
// for each execution that succeeds, every streamed byte exactly once, and the rows that its
// launches gathered. `busy_ns` is the duration of both; gathering also counts in `wait_ns`. The
// lists are filled only for a timeline. Transfers are those that have ended since the last report,
// or are under way.
//
// A device that executes a graph or a model by itself may not read a clock: then `is_timed` is
// false, and times and lists are meaningless. `untimed_bytes` are the part of `bytes` that an
// execution without a clock copied ahead, so that they are not in `busy_ns`.
struct PassReport {
  std::uint64_t bytes = 0;
  bool is_timed = true;
  std::uint64_t untimed_bytes = 0;
  std::uint64_t busy_ns = 0;
  std::uint64_t wait_ns = 0;  // waits of launches for weights
  // From when the device reached the execution until its outputs were ready, by the device's clock;
  // no value if execute returns only then, or no clock was read.
  std::optional<std::uint64_t> device_ns;
  std::vector<TransferTime> transfers;
  std::vector<WeightWait> waits;
};

}  // namespace offload
