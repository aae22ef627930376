#include "run/overlaps.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload {

std::string given_name(std::size_t index) { return "out[" + std::to_string(index) + "]"; }

namespace {

[[noreturn]] void refuse(const std::string& message) { throw BindingError(message); }

Range range_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uint64_t>(tensor.const_data_ptr());
  return {begin, begin + span_bytes_of(tensor)};
}

// Inputs of which one is written must overlap exactly as recorded, all others not at all.
void check_written_inputs(const CallSpec& spec, const Call& call) {
  for (std::size_t first = 0; first < spec.inputs.size(); ++first) {
    for (std::size_t second = first + 1; second < spec.inputs.size(); ++second) {
      if (!spec.inputs[first].written && !spec.inputs[second].written) continue;
      const Range one = range_of(call.inputs[first]);
      const Range other = range_of(call.inputs[second]);
      const OverlapSpec* recorded = nullptr;
      for (const OverlapSpec& overlap : spec.overlaps) {
        if (overlap.first == first && overlap.second == second) recorded = &overlap;
      }
      const std::string names = spec.inputs[first].name + " and " + spec.inputs[second].name;
      if (recorded == nullptr) {
        if (one.overlaps(other)) {
          refuse(names + " overlap in memory and one of them is written: they were separate when " +
                 "recorded, so pass separate tensors");
        }
      } else if (static_cast<std::int64_t>(other.begin - one.begin) != recorded->distance_bytes ||
                 !call.bound_inputs[first].is_same(call.inputs[first]) ||
                 !call.bound_inputs[second].is_same(call.inputs[second])) {
        refuse(names + " shared memory when recorded, " + std::to_string(recorded->distance_bytes) +
               " bytes apart, and one of them is written: they must do so again, with the same " +
               "strides");
      }
    }
  }
}

// Calls `check` with the ranges of the model's tensors, and with the memory in which launches find
// a weight if that differs: the former may be read at any time to be copied to the latter. A weight
// whose rows are gathered has no such memory.
template <typename Check>
void for_each_range(const CallSpec& spec, Check check) {
  for (const WeightPlace& place : spec.weight_places) {
    const std::uint64_t begin = place.address();
    if (begin != 0) check(Range{begin, begin + place.size_bytes}, spec.weights[place.weight]);
  }
}

// Inputs and weights of which one is written must not overlap.
void check_written_weights(const CallSpec& spec, const Call& call) {
  for_each_range(spec, [&](const Range& range, const WeightSpec& weight) {
    for (std::size_t index = 0; index < spec.inputs.size(); ++index) {
      if (!weight.written && !spec.inputs[index].written) continue;
      if (!range_of(call.inputs[index]).overlaps(range)) continue;
      refuse(spec.inputs[index].name + " overlaps " + weight.name +
             " in memory and one of them is written: pass a copy");
    }
  });
}

// The memory of the given buffers, sorted for quick lookup of other ranges.
class GivenRanges {
 public:
  explicit GivenRanges(const Tensors& given) {
    for (std::size_t index = 0; index < given.size(); ++index) {
      if (!given[index].defined() || given[index].numel() == 0) continue;
      ranges_.push_back({range_of(given[index]), index});
    }
    std::sort(ranges_.begin(), ranges_.end(), [](const Given& one, const Given& other) {
      return one.range.begin < other.range.begin;
    });
    for (std::size_t at = 1; at < ranges_.size(); ++at) {
      if (!ranges_[at - 1].range.overlaps(ranges_[at].range)) continue;
      const auto [first, second] = std::minmax(ranges_[at - 1].index, ranges_[at].index);
      refuse(given_name(first) + " overlaps " + given_name(second) + ": pass separate memory");
    }
    if (ranges_.empty()) return;
    all_ = {ranges_.front().range.begin, ranges_.back().range.end};
  }

  // Refuses a buffer that overlaps `range`, the memory of `name`.
  void refuse_overlap(const Range& range, const std::string& name) const {
    if (range.begin == range.end || !range.overlaps(all_)) return;
    const auto after =
        std::lower_bound(ranges_.begin(), ranges_.end(), range.end,
                         [](const Given& one, std::uint64_t end) { return one.range.begin < end; });
    if (after == ranges_.begin() || !std::prev(after)->range.overlaps(range)) return;
    refuse(given_name(std::prev(after)->index) + " overlaps " + name +
           " in memory: pass separate memory");
  }

 private:
  struct Given {
    Range range;
    std::size_t index;
  };
  c10::SmallVector<Given, 4> ranges_;
  Range all_{0, 0};  // from the first to the last
};

// Whether some memory of the call that must not overlap weights may do so.
bool may_overlap(const CallSpec& spec, const Call& call, const Stretches& memory) {
  const auto lies_in = [&](const at::Tensor& tensor) {
    return tensor.defined() && memory.overlap(range_of(tensor));
  };
  return (spec.has_writes && std::any_of(call.inputs.begin(), call.inputs.end(), lies_in)) ||
         std::any_of(call.given_results.begin(), call.given_results.end(), lies_in) ||
         lies_in(call.feature_map);
}

}  // namespace

Stretches::Stretches(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& one, const Range& other) { return one.begin < other.begin; });
  for (const Range& range : ranges) {
    if (range.begin == range.end) continue;
    if (!merged_.empty() && range.begin <= merged_.back().end) {
      merged_.back().end = std::max(merged_.back().end, range.end);
    } else {
      merged_.push_back(range);
    }
  }
}

bool Stretches::overlap(const Range& range) const {
  const auto after =
      std::lower_bound(merged_.begin(), merged_.end(), range.end,
                       [](const Range& one, std::uint64_t end) { return one.begin < end; });
  return after != merged_.begin() && std::prev(after)->overlaps(range);
}

Stretches weight_memory(const CallSpec& spec) {
  std::vector<Range> ranges;
  for_each_range(spec, [&](const Range& range, const WeightSpec&) { ranges.push_back(range); });
  return Stretches(std::move(ranges));
}

void prepare_overlap_checks(CallSpec& spec) {
  const auto is_written = [](const auto& one) { return one.written; };
  spec.has_writes = std::any_of(spec.inputs.begin(), spec.inputs.end(), is_written) ||
                    std::any_of(spec.weights.begin(), spec.weights.end(), is_written);
  spec.weight_places.clear();
  spec.written_weights.clear();
  for (std::size_t index = 0; index < spec.weights.size(); ++index) {
    const WeightSpec& weight = spec.weights[index];
    if (weight.written) spec.written_weights.push_back(index);
    const auto add = [&](const at::Tensor& tensor) {
      spec.weight_places.push_back({tensor.unsafeGetTensorImpl(), weight.size_bytes, index});
    };
    add(weight.holders.front());
    if (weight.moved.defined()) add(weight.moved);
  }
}

void check_input_overlaps(const CallSpec& spec, const Call& call) {
  if (spec.has_writes) check_written_inputs(spec, call);
}

void check_given_overlaps(const CallSpec& spec, const Call& call) {
  const GivenRanges given(call.given_results);
  for (std::size_t index = 0; index < spec.inputs.size(); ++index) {
    given.refuse_overlap(range_of(call.inputs[index]), spec.inputs[index].name);
  }
}

void check_feature_map_overlaps(const CallSpec& spec, const Call& call) {
  const Range range = range_of(call.feature_map);
  for (std::size_t index = 0; index < call.inputs.size(); ++index) {
    if (range_of(call.inputs[index]).overlaps(range)) {
      refuse("feature_map overlaps " + spec.inputs[index].name + ": pass separate memory");
    }
  }
  for (const at::Tensor& given : call.given_results) {
    if (given.defined() && range_of(given).overlaps(range)) {
      refuse("feature_map overlaps an out= buffer: pass separate memory");
    }
  }
}

void check_weight_overlaps(const CallSpec& spec, const Call& call, const Stretches* memory) {
  if (memory != nullptr && !may_overlap(spec, call, *memory)) return;
  if (spec.has_writes) check_written_weights(spec, call);
  const GivenRanges given(call.given_results);
  const Range map = call.feature_map.defined() ? range_of(call.feature_map) : Range{};
  for_each_range(spec, [&](const Range& range, const WeightSpec& weight) {
    given.refuse_overlap(range, weight.name);
    if (map.overlaps(range)) {
      refuse("feature_map overlaps " + weight.name + ": pass separate memory");
    }
  });
}

}  // namespace offload
