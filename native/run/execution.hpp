// What an execution did and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/header.hpp"
#include "offload/resident.hpp"
#include "run/drain.hpp"

namespace offload {

// What an execution did, and the times of which m_l_t consists, in ns of the steady clock.
struct LastExecution {
  std::uint64_t call_ns = 0;     // the caller's call
  std::uint64_t checked_ns = 0;  // its arguments checked, outputs allocated
  std::uint64_t begin_ns = 0;    // the same if nothing was waited for; otherwise the wait's end
  std::uint64_t bound_ns = 0;    // addresses bound
  std::uint64_t decided_ns = 0;  // it is known what moved
  std::uint64_t patched_ns = 0;  // words written
  Submission submission;         // with host scheduling it ends when delivery begins
  std::uint64_t end_ns = 0;      // the last launch has ended
  Drain drain;                   // for the caller's stream: between call_ns and checked_ns
  Drain drain_of_copies;         // after torch's copies of inputs: between begin_ns and bound_ns
  HeaderCounts counts;
  std::uint64_t bytes_copied = 0;
  std::uint32_t outputs_allocated = 0;
  std::uint64_t bytes_streamed = 0;  // of weights, for this execution
  std::uint64_t n_executions = 0;    // of this executable so far, including this one
  // Of an execution that streams weights; no value if not measured.
  std::optional<std::uint64_t> stream_timed_bytes;  // bytes_streamed covered by the next field
  std::optional<std::uint64_t> stream_busy_ns;      // the time of their copies
  std::optional<std::uint64_t> stream_wait_ns;      // part of pass_ns: launches waited for weights
  std::optional<std::uint64_t> pass_ns;             // launches and waits until outputs were ready
  std::optional<std::vector<WeightWait>> stream_waits;  // by launch; for a timeline only
  Proof proof;                                          // part of device_ns
  std::optional<SizesFound> sizes_found;                // where sizes vary
  std::vector<std::int64_t> sizes;                      // by dim, likewise
  std::uint64_t resize_ns = 0;  // part of convert_ns: resizing the resident; 0: not needed

  // The stages of m_l_t, and the launches after it.
  std::uint64_t drain_ns() const { return drain.ns() + drain_of_copies.ns(); }
  std::uint64_t convert_ns() const {
    return checked_ns - call_ns + bound_ns - begin_ns - drain_ns();
  }
  std::uint64_t policy_ns() const { return decided_ns - bound_ns; }
  std::uint64_t patch_ns() const { return patched_ns - decided_ns; }
  std::uint64_t submit_ns() const { return submission.end_ns - patched_ns; }
  std::uint64_t device_ns() const { return end_ns - submission.end_ns; }
};

// A copy made because a tensor could not be used in place.
struct Transfer {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t size_bytes;
  bool inbound;
};

// All data of an execution that a timeline records.
struct ExecutionTrace {
  explicit ExecutionTrace(std::size_t n_launches) : launches(n_launches), issues(n_launches) {}

  LastExecution execution;
  LaunchTimes launches;
  LaunchTimes issues;  // host scheduling only
  std::vector<Transfer> transfers;
  std::vector<TransferTime> weight_transfers;  // the parts of them within the execution
  std::vector<WeightWait> weight_waits;
  std::uint64_t clock_reads = 0;  // for the times of `execution`, because of the trace
};

}  // namespace offload
