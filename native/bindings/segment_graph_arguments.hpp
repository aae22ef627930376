// A SegmentGraph from the arguments of Python's constructors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "offload/segment_prediction.hpp"

namespace offload {

using Integers = std::vector<std::int64_t>;
using Numbers = std::vector<double>;
using LinkFields = std::tuple<double, double>;
using ValueFields = std::tuple<std::int64_t, double, Integers, bool>;

inline SegmentGraph graph_of(std::size_t n_devices, Numbers costs_ns, std::vector<Integers> after,
                             double hand_over_ns, Integers memory_of, std::int64_t home,
                             const std::vector<LinkFields>& links,
                             const std::vector<ValueFields>& values) {
  SegmentGraph graph{n_devices,
                     std::move(costs_ns),
                     std::move(after),
                     hand_over_ns,
                     std::move(memory_of),
                     home,
                     {},
                     {}};
  for (const auto& [overhead_ns, bytes_per_second] : links) {
    graph.links.push_back({overhead_ns, bytes_per_second});
  }
  for (const auto& [producer, size_bytes, readers, is_returned] : values) {
    graph.values.push_back({producer, size_bytes, readers, is_returned});
  }
  return graph;
}

inline ChoiceObjective objective_of(bool is_throughput) {
  return is_throughput ? ChoiceObjective::kThroughput : ChoiceObjective::kLatency;
}

}  // namespace offload
