// Which tensors of a call may share memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/call.hpp"

namespace offload {

// The name in messages of a buffer that the caller gives for a result.
std::string given_name(std::size_t index);

// Lists the memory of weights, and whether anything is written, for the checks below.
void prepare_overlap_checks(CallSpec& spec);

// A tensor's memory, from its first byte to one past the last.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

// A set of memory ranges, merged, so that an overlap is found without looking at each range.
// Thread: any may read.
class Stretches {
 public:
  Stretches() = default;
  explicit Stretches(std::vector<Range> ranges);

  bool overlap(const Range& range) const;

 private:
  std::vector<Range> merged_;  // by address; no two adjoin
};

// The memory of the model's tensors, and that in which launches find a weight if it differs.
Stretches weight_memory(const CallSpec& spec);

// The following refuse memory that a call's tensors share but must not.
//
// Thread: any. Errors: BindingError naming both.

// Inputs that overlap otherwise than recorded, if one of them is written. Needs the bound inputs.
void check_input_overlaps(const CallSpec& spec, const Call& call);

// Buffers for results that overlap each other or an input.
void check_given_overlaps(const CallSpec& spec, const Call& call);

// A given feature map that overlaps an input or a buffer for a result.
void check_feature_map_overlaps(const CallSpec& spec, const Call& call);

// Overlaps with a weight: of buffers, of the feature map, and of inputs if the input or the weight
// is written. `memory`: of the weights; null if unknown, as they have moved.
void check_weight_overlaps(const CallSpec& spec, const Call& call, const Stretches* memory);

}  // namespace offload
