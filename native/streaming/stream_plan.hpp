// Weight streaming as data: what is resident in the weight memory, what is copied there, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace offload {

// Contiguous bytes of one weight, and their place in the weight memory.
struct WeightPiece {
  std::size_t offset_bytes = 0;  // in the weight
  std::size_t size_bytes = 0;
  std::size_t memory_offset_bytes = 0;
  bool streamed = false;  // copied by transfers; otherwise resident
};

struct WeightPlacement {
  std::string name;
  std::size_t size_bytes = 0;
  std::vector<WeightPiece> pieces;  // adjacent, in ascending offset, covering the weight
  // It has no place in the weight memory and no pieces: launches read its rows from its source.
  bool gathered = false;
};

// One copy of a streamed piece; a pass may make several. Transfers run in order, one at a time.
struct WeightTransfer {
  std::size_t weight = 0;
  std::size_t piece = 0;         // of that weight
  std::size_t first_launch = 0;  // of the pass, that reads the piece
  std::size_t last_launch = 0;   // likewise; after it the piece may be overwritten
  std::size_t after_launch = 0;  // the transfer may begin when this launch has ended
  int after_pass = 0;            // 0: of the same pass; -1: of the pass before
};

struct StreamPlan {
  std::size_t memory_bytes = 0;
  std::size_t granule_bytes = 1;  // the unit in which memory can be mapped
  std::vector<WeightPlacement> weights;
  std::vector<WeightTransfer> transfers;
  std::size_t n_launches = 0;
};

// A table in a gathered weight: contiguous rows.
struct RowTable {
  std::size_t weight = 0;
  std::size_t offset_bytes = 0;  // in the weight
  std::size_t n_rows = 0;
  std::size_t row_bytes = 0;
};

// Refuses a plan that would never end, or whose resident bytes are not safe. Whether a transfer
// overwrites ring bytes too early is left to the planner's own checker.
//
// Throws PlanError, naming the weight or transfer, for: a gathered weight with pieces; pieces that
// do not make up their weight, lie outside the memory, or are mapped off the granule or the
// system's page; a resident piece that shares bytes with another piece; a streamed piece without a
// transfer; an index that does not exist; a transfer that waits for a launch which waits for it.
void check_plan(const StreamPlan& plan);

// For a device that cannot map pieces side by side: throws PlanError for a weight in several
// pieces.
void require_whole_weights(const StreamPlan& plan, const char* device_name);

// Throws BindingError for a weight that the plan does not have.
void check_weight(const StreamPlan& plan, std::size_t weight);

// Throws PlanError for a table of a weight that is not gathered, or that exceeds its weight.
void check_table(const StreamPlan& plan, const RowTable& table);

// By launch, the number of transfers of its pass that must be done before it may begin.
std::vector<std::size_t> transfers_before(const StreamPlan& plan);

}  // namespace offload
