// What one execution did with weights that are streamed.
#pragma once

#include <cstddef>
#include <cstdint>
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
struct PassReport {
  std::uint64_t bytes = 0;
  std::uint64_t busy_ns = 0;
  std::uint64_t wait_ns = 0;  // of launches for weights
  std::vector<TransferTime> transfers;
  std::vector<WeightWait> waits;
};

}  // namespace offload
