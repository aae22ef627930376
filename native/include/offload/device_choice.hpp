// The choice of a device for each segment of a placed Program, from costs, paces and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/segment_prediction.hpp"

namespace offload {

// Searches devices for the segments of one SegmentGraph.
//
// Owner: one caller. Thread: one at a time. Errors: PlanError, as `SegmentPrediction`.
class DeviceSearch {
 public:
  explicit DeviceSearch(SegmentGraph graph);

  // The objective of an execution on these devices.
  double value(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
               ChoiceObjective objective);
  // When each device has ended an execution on these devices, and earlier ones.
  const std::vector<double>& freed(const std::vector<std::int64_t>& devices,
                                   const DeviceLoads& loads);

  // Begins a search from these choices, the earliest ends, and all segments on one device: `found`
  // is the best of them.
  void begin(const std::vector<std::vector<std::int64_t>>& choices, const DeviceLoads& loads,
             ChoiceObjective objective);
  // Goes on with at most one more than this many evaluations: other devices for one segment, for
  // one and another that it waits for, or for consecutive ones, and exchanges of two. Where none is
  // better it goes on from the next choice, and then from `found` with segments moved at random
  // (seeded). Returns whether the search has ended, after 100 evaluations for each segment.
  bool improve(std::int64_t max_evaluations);
  const std::vector<std::int64_t>& found() const { return found_; }
  double found_value() const { return found_value_; }

 private:
  // Another choice: all segments from the first to the last, or these two, on a device; or these
  // two exchanged.
  struct Neighbour {
    enum Kind : std::uint8_t { kRun, kPair, kExchange } kind;
    std::uint32_t first, last;
    std::int64_t device;
  };

  void lay_out_neighbours();
  void restart();
  bool apply(const Neighbour& one, std::vector<std::int64_t>& devices) const;

  SegmentPrediction prediction_;
  std::vector<Neighbour> neighbours_;
  DeviceLoads loads_;
  ChoiceObjective objective_ = ChoiceObjective::kLatency;
  std::vector<std::vector<std::int64_t>> starts_;
  std::vector<std::int64_t> found_, present_, attempt_;
  double found_value_ = 0, present_value_ = 0;
  std::size_t next_ = 0, n_vain_ = 0, next_start_ = 0;
  std::int64_t n_left_ = 0;
  std::uint64_t n_restarts_ = 0;
};

}  // namespace offload
