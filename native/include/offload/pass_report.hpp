// What one execution did with weights that are streamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace offload {

// When a transfer of a weight's piece ran. One that is under way has the moment of the report as
// its end, and is in the next report again.
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

// `bytes` are those that the execution's own transfers brought, also where they ran before it
// began: of each execution that ends well they are all streamed bytes, exactly once, and the rows
// that its launches gathered; `busy_ns` is what they took, and gathering is in `wait_ns` as well.
// The lists are kept where a timeline asks; transfers are those that ended since the last report or
// run.
//
// A device that executes a graph or a model by itself may not look at a clock: then `is_timed` is
// false, and times and lists say nothing. `untimed_bytes` are those of `bytes` that an execution
// without a clock brought ahead, so that they are not in `busy_ns`.
struct PassReport {
  std::uint64_t bytes = 0;
  bool is_timed = true;
  std::uint64_t untimed_bytes = 0;
  std::uint64_t busy_ns = 0;
  std::uint64_t wait_ns = 0;  // of launches for weights
  // From the moment at which the device came to the execution until its outputs were ready, by the
  // device's clock; nothing where execute returns when they are, or where no clock was read.
  std::optional<std::uint64_t> device_ns;
  std::vector<TransferTime> transfers;
  std::vector<WeightWait> waits;
};

}  // namespace offload
