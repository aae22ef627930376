// Which of a call's tensors may share memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/call.hpp"

namespace offload {

// What a buffer that the caller gives for a result is called in messages.
std::string given_name(std::size_t index);

// Lists where weights lie, and whether anything is written, for the checks below.
void prepare_overlap_checks(CallSpec& spec);

// A tensor's memory, from its first byte to one past the last.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

// Memory as the stretches of which it consists, so that whether something lies there is known
// without looking at each piece. Thread: any may read.
class Stretches {
 public:
  Stretches() = default;
  explicit Stretches(std::vector<Range> ranges);

  bool overlap(const Range& range) const;

 private:
  std::vector<Range> merged_;  // by address; none touches the next
};

// Where the model's tensors lie, and where launches find a weight if that is somewhere else.
Stretches weight_memory(const CallSpec& spec);

// Each of these refuses memory that a call's tensors share and may not.
//
// Thread: any. Errors: BindingError naming both.

// Inputs that overlap each other otherwise than recorded, one of them being written. Needs the
// bound inputs.
void check_input_overlaps(const CallSpec& spec, const Call& call);

// Buffers for results that overlap each other or an input.
void check_given_overlaps(const CallSpec& spec, const Call& call);

// A feature map, which is there, that overlaps an input or a buffer for a result.
void check_feature_map_overlaps(const CallSpec& spec, const Call& call);

// All of these that overlap a weight and may not: buffers, the feature map, and inputs where one of
// the two is written. `memory`: of the weights; null where it is not known, as they have moved.
void check_weight_overlaps(const CallSpec& spec, const Call& call, const Stretches* memory);

}  // namespace offload
