#include "streaming/stream_plan.hpp"

#include <unistd.h>

#include <algorithm>

#include "offload/errors.hpp"

namespace offload {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) {
  throw PlanError("streaming plan: " + what + ": " + why);
}

std::string bytes(std::size_t begin, std::size_t end) {
  return "bytes " + std::to_string(begin) + " to " + std::to_string(end);
}

void check_pieces(const StreamPlan& plan, const WeightPlacement& weight) {
  if (weight.gathered && weight.pieces.empty()) return;
  if (weight.gathered)
    refuse(weight.name, "its rows are gathered, and it has pieces in the memory");
  std::size_t offset_bytes = 0;
  for (const WeightPiece& piece : weight.pieces) {
    if (piece.offset_bytes != offset_bytes || piece.size_bytes == 0) {
      refuse(weight.name, "expected a piece that begins at byte " + std::to_string(offset_bytes) +
                              ", got " + std::to_string(piece.size_bytes) + " bytes at " +
                              std::to_string(piece.offset_bytes));
    }
    if (piece.memory_offset_bytes > plan.memory_bytes ||
        piece.size_bytes > plan.memory_bytes - piece.memory_offset_bytes) {
      refuse(weight.name, "expected a place within " + std::to_string(plan.memory_bytes) +
                              " bytes of memory, got " + std::to_string(piece.size_bytes) +
                              " bytes at " + std::to_string(piece.memory_offset_bytes));
    }
    const std::size_t unit = weight.pieces.size() == 1 ? 1 : plan.granule_bytes;
    if (piece.offset_bytes % unit != 0 || piece.memory_offset_bytes % unit != 0) {
      refuse(weight.name, "a weight in several pieces is mapped by granules of " +
                              std::to_string(unit) + " bytes, got offset " +
                              std::to_string(piece.offset_bytes) + " at " +
                              std::to_string(piece.memory_offset_bytes));
    }
    offset_bytes += piece.size_bytes;
  }
  if (offset_bytes != weight.size_bytes) {
    refuse(weight.name, "its pieces are " + std::to_string(offset_bytes) + " of " +
                            std::to_string(weight.size_bytes) + " bytes");
  }
}

void check_granule(const StreamPlan& plan) {
  const bool mapped = std::any_of(plan.weights.begin(), plan.weights.end(),
                                  [](const auto& weight) { return weight.pieces.size() > 1; });
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (plan.granule_bytes == 0 || (mapped && plan.granule_bytes % page_bytes != 0)) {
    refuse("granule", "expected a multiple of the page of " + std::to_string(page_bytes) +
                          " bytes, got " + std::to_string(plan.granule_bytes));
  }
}

// In ascending order, a resident piece must end before the next one begins, and begin after all
// earlier ones have ended.
void check_residents(const StreamPlan& plan) {
  struct Range {
    std::size_t begin, end;
    bool streamed;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const WeightPlacement& weight : plan.weights) {
    for (const WeightPiece& piece : weight.pieces) {
      ranges.push_back({piece.memory_offset_bytes, piece.memory_offset_bytes + piece.size_bytes,
                        piece.streamed, &weight.name});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& one, const Range& other) { return one.begin < other.begin; });
  const Range* furthest = nullptr;
  const Range* furthest_resident = nullptr;
  for (const Range& range : ranges) {
    const Range* const other = range.streamed ? furthest_resident : furthest;
    if (other != nullptr && other->end > range.begin) {
      refuse(*range.name, "shares " + bytes(range.begin, std::min(range.end, other->end)) +
                              " with " + *other->name + ", and one of them is resident");
    }
    if (furthest == nullptr || range.end > furthest->end) furthest = &range;
    if (!range.streamed && (furthest_resident == nullptr || range.end > furthest_resident->end)) {
      furthest_resident = &range;
    }
  }
}

void check_transfer(const StreamPlan& plan, std::size_t index) {
  const WeightTransfer& one = plan.transfers[index];
  const std::string what = "transfer " + std::to_string(index);
  if (one.weight >= plan.weights.size() || one.piece >= plan.weights[one.weight].pieces.size()) {
    refuse(what, "piece " + std::to_string(one.piece) + " of weight " + std::to_string(one.weight) +
                     " does not exist");
  }
  if (!plan.weights[one.weight].pieces[one.piece].streamed) {
    refuse(what, "its piece of " + plan.weights[one.weight].name + " is resident");
  }
  if (one.first_launch > one.last_launch || one.last_launch >= plan.n_launches ||
      one.after_launch >= plan.n_launches || (one.after_pass != 0 && one.after_pass != -1)) {
    refuse(what, "expected launches among " + std::to_string(plan.n_launches) +
                     " and a pass of 0 or -1, got first " + std::to_string(one.first_launch) +
                     ", last " + std::to_string(one.last_launch) + ", after " +
                     std::to_string(one.after_launch) + " of pass " +
                     std::to_string(one.after_pass));
  }
}

}  // namespace

void require_whole_weights(const StreamPlan& plan, const char* device_name) {
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.pieces.size() <= 1) continue;
    throw PlanError(weight.name + ": on " + device_name + " a weight lies in one piece, got " +
                    std::to_string(weight.pieces.size()));
  }
}

void check_weight(const StreamPlan& plan, std::size_t weight) {
  if (weight < plan.weights.size()) return;
  throw BindingError("expected one of " + std::to_string(plan.weights.size()) +
                     " weights, got number " + std::to_string(weight));
}

void check_table(const StreamPlan& plan, const RowTable& table) {
  check_weight(plan, table.weight);
  const WeightPlacement& weight = plan.weights[table.weight];
  if (!weight.gathered) refuse(weight.name, "rows of it are to be read, and it is not gathered");
  const std::size_t most_bytes =
      weight.size_bytes - std::min(weight.size_bytes, table.offset_bytes);
  if (table.row_bytes > 0 && table.n_rows <= most_bytes / table.row_bytes) return;
  refuse(weight.name, "expected a table within its " + std::to_string(weight.size_bytes) +
                          " bytes, got " + std::to_string(table.n_rows) + " rows of " +
                          std::to_string(table.row_bytes) + " bytes at " +
                          std::to_string(table.offset_bytes));
}

std::vector<std::size_t> transfers_before(const StreamPlan& plan) {
  std::vector<std::size_t> n_before(plan.n_launches, 0);
  for (std::size_t index = 0; index < plan.transfers.size(); ++index) {
    n_before[plan.transfers[index].first_launch] = index + 1;  // ascending, so the last one remains
  }
  for (std::size_t launch = 1; launch < n_before.size(); ++launch) {
    n_before[launch] = std::max(n_before[launch], n_before[launch - 1]);
  }
  return n_before;
}

void check_plan(const StreamPlan& plan) {
  check_granule(plan);
  for (const WeightPlacement& weight : plan.weights) check_pieces(plan, weight);
  check_residents(plan);
  std::vector<std::vector<bool>> transferred;
  for (const WeightPlacement& weight : plan.weights) transferred.emplace_back(weight.pieces.size());
  for (std::size_t index = 0; index < plan.transfers.size(); ++index) {
    check_transfer(plan, index);
    transferred[plan.transfers[index].weight][plan.transfers[index].piece] = true;
  }
  for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
    const std::vector<WeightPiece>& pieces = plan.weights[weight].pieces;
    for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
      if (pieces[piece].streamed && !transferred[weight][piece]) {
        refuse(plan.weights[weight].name,
               "no transfer copies its streamed piece " + std::to_string(piece));
      }
    }
  }
  const std::vector<std::size_t> n_before = transfers_before(plan);
  for (std::size_t index = 0; index < plan.transfers.size(); ++index) {
    const WeightTransfer& one = plan.transfers[index];
    if (one.after_pass == 0 && n_before[one.after_launch] > index) {
      refuse("transfer " + std::to_string(index),
             "waits for launch " + std::to_string(one.after_launch) + ", which waits for it");
    }
  }
}

}  // namespace offload
