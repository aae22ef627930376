// Weight streaming: the duration of passes under a plan, and the search for a plan.
//
// A pass is one execution of a program. Weights lie in one range of device memory. A part of it,
// the ring, is written by transfers, each of which writes a piece always at the same position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace offload {

// One copy of a pass. Transfers run in order, one at a time. A transfer may begin when the launch
// `after_step` has ended: launch l of the same pass is step l, of the pass before l - n_launches.
// The launch `first_launch` waits for it.
struct StreamingTransfer {
  double duration_ns;
  std::int64_t first_launch;
  std::int64_t after_step;
};

// The last simulated pass. Times count from the end of the last launch of the pass before, so that
// transfers made ahead may begin before zero.
struct StreamingPass {
  double period_ns = 0;
  std::vector<double> launch_begin_ns;
  std::vector<double> launch_end_ns;
  std::vector<double> transfer_begin_ns;
  std::vector<double> transfer_end_ns;
};

// Simulates consecutive passes, the first from an empty ring: at least three, and at most sixteen,
// until two periods in a row agree. Launches run in order, each after the one before and its
// transfers have ended.
//
// Owner: the caller; its memory is reused between simulations. Thread: one at a time. Errors:
// PlanError if a transfer waits for a launch that waits for it, or names a launch that does not
// exist.
class StreamingSimulator {
 public:
  explicit StreamingSimulator(std::vector<double> launch_ns);

  // The duration of the last pass, from the end of the pass before to its own end.
  double period_ns(const std::vector<StreamingTransfer>& transfers);

  // That pass, in full.
  StreamingPass pass(const std::vector<StreamingTransfer>& transfers);

 private:
  void require_valid(const std::vector<StreamingTransfer>& transfers) const;
  void run_pass(const std::vector<StreamingTransfer>& transfers);
  void launch_until(std::size_t end);

  std::vector<double> launch_ns_;
  std::vector<double> arrival_ns_;  // by launch: when all that it waits for has arrived
  std::vector<double> begin_ns_;
  std::vector<double> end_ns_;
  std::vector<double> last_end_ns_;  // of the pass before
  std::vector<double> transfer_begin_ns_;
  std::vector<double> transfer_end_ns_;
  std::size_t n_launched_ = 0;
  double compute_ns_ = 0;  // when the compute lane is free
  double copy_ns_ = 0;     // when the copy lane is free
};

// A weight that the launches first_launch to last_launch read, perhaps not all of them.
struct StreamingWeight {
  std::int64_t size_bytes;
  std::int64_t first_launch;
  std::int64_t last_launch;
  bool stays;
};

struct StreamingOptions {
  double link_bytes_per_second;
  double link_overhead_ns;
  std::int64_t budget_bytes;
  // A budget for which the caller has a plan: levels of memory are counted from it.
  std::int64_t floor_bytes;
  double floor_period_ns;  // of that plan
  // Whole weights, resident or as one piece, lie at its multiples; divides the granule.
  std::int64_t alignment_bytes;
  // Pieces of a weight lie at its multiples; all but the last are multiples of it.
  std::int64_t granule_bytes;
  bool tails;  // weights may be streamed in part
};

// What is streamed of each weight (its last bytes), and its position in the ring.
struct StreamingLayout {
  std::vector<std::int64_t> streamed_bytes;  // by weight
  std::vector<std::int64_t> ring_offset_bytes;
  std::vector<std::int64_t> order;  // weights in the order of their transfers
  std::vector<StreamingTransfer> transfers;
  std::int64_t ring_bytes = 0;
  double period_ns = 0;
};

struct StreamingSearch {
  std::optional<StreamingLayout> best;  // no value if none is quicker than the floor's plan
  std::int64_t n_candidates = 0;        // simulated
};

// The quickest of a fixed family of plans.
//
// Its members do not depend on the budget: each belongs to one of a fixed series of levels of
// memory, and a budget admits those at or below it. More budget is therefore never slower. For
// eight weights or fewer all sets of whole weights are members, with all positions in the ring that
// fit. A member is skipped only if a lower bound of its period is no less than the best one found.
//
// Thread: any; nothing is shared. Errors: PlanError if an option or a weight is out of range.
StreamingSearch search_streaming(const std::vector<double>& launch_ns,
                                 const std::vector<StreamingWeight>& weights,
                                 const StreamingOptions& options);

}  // namespace offload
