// What one execution did and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/header.hpp"
#include "offload/resident.hpp"
#include "run/drain.hpp"

namespace offload {

// What one execution did, and the moments that m_l_t is made of, in ns of the steady clock.
struct LastExecution {
  std::uint64_t call_ns = 0;     // the caller's call
  std::uint64_t checked_ns = 0;  // its arguments checked, outputs allocated
  std::uint64_t begin_ns = 0;    // the same where nothing was waited for; else the wait's end
  std::uint64_t bound_ns = 0;    // addresses bound
  std::uint64_t decided_ns = 0;  // what moved is known
  std::uint64_t patched_ns = 0;  // words written
  Submission submission;         // by host scheduling it ends when delivery begins
  std::uint64_t end_ns = 0;      // the last launch has ended
  Drain drain;                   // for the caller's stream: between call_ns and checked_ns
  Drain drain_of_copies;         // behind copies of inputs by torch: between begin_ns and bound_ns
  HeaderCounts counts;
  std::uint64_t bytes_copied = 0;
  std::uint32_t outputs_allocated = 0;
  std::uint64_t bytes_streamed = 0;  // of weights, brought for it
  std::uint64_t n_executions = 0;    // of this executable so far, this one included
  // Of an execution that streams weights; nothing where it was not measured.
  std::optional<std::uint64_t> stream_timed_bytes;  // of bytes_streamed, those that are in the next
  std::optional<std::uint64_t> stream_busy_ns;      // what bringing them took
  std::optional<std::uint64_t> stream_wait_ns;      // of pass_ns: launches waited for weights
  std::optional<std::uint64_t> pass_ns;             // launches and waits until outputs were ready
  std::optional<std::vector<WeightWait>> stream_waits;  // by launch; where a timeline asked
  Proof proof;                                          // part of device_ns
  std::optional<SizesFound> sizes_found;                // where sizes vary
  std::vector<std::int64_t> sizes;                      // by dim, likewise
  std::uint64_t resize_ns = 0;  // of convert_ns: the resident took other sizes; 0: it had these

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

// A copy that was made because a tensor could not be used where it lay.
struct Transfer {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t size_bytes;
  bool inbound;
};

// All of one execution, as a timeline records it.
struct ExecutionTrace {
  explicit ExecutionTrace(std::size_t n_launches) : launches(n_launches), issues(n_launches) {}

  LastExecution execution;
  LaunchTimes launches;
  LaunchTimes issues;  // host scheduling only
  std::vector<Transfer> transfers;
  std::vector<TransferTime> weight_transfers;  // their parts that lie within the execution
  std::vector<WeightWait> weight_waits;
  std::uint64_t clock_reads = 0;  // made for the moments of `execution` because of the trace
};

}  // namespace offload
