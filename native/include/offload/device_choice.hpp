// The choice of a device for each segment of a placed Program, from costs, paces and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/task_placement.hpp"

namespace offload {

// The producer of what the caller gives, and the reader of what the caller takes.
inline constexpr std::int64_t kCaller = -1;

// Values that have the same producer and readers: their copies begin together.
struct SharedValues {
  std::int64_t producer;  // a segment, or kCaller
  double size_bytes;
  std::vector<std::int64_t> readers;  // segments behind the producer, ascending
  bool is_returned;                   // whether the caller reads them too
};

// Segments in an order in which they may run. A device runs one at a time, those first that are
// ready first.
struct SegmentGraph {
  std::size_t n_devices = 0;
  std::vector<double> costs_ns;                  // segment * n_devices + device; or kCannotRun
  std::vector<std::vector<std::int64_t>> after;  // by segment, the earlier ones that it waits for
  double hand_over_ns = 0;                       // from one device to another
  // Memories are numbered. The caller's values lie in `home`.
  std::vector<std::int64_t> memory_of;  // by device
  std::int64_t home = 0;
  std::vector<ProcessorLink> links;  // from memory * n_memories + to memory
  std::vector<SharedValues> values;
};

// The circumstances of an execution.
struct DeviceLoads {
  std::vector<double> paces;    // by device: measured durations over expected ones
  std::vector<double> free_ns;  // by device: when it has ended earlier executions
};

enum class ChoiceObjective : std::int64_t {
  kLatency,     // when the last segment or copy for the caller has ended
  kThroughput,  // the time of the busiest device or direction between two memories
};

// Predicts executions of one SegmentGraph, and searches better devices.
//
// A value is copied once to each memory in which it is read; what one producer sends to one memory
// is one copy, which begins when the producer has ended. A direction between two memories carries
// one copy at a time.
//
// Owner: one caller. Thread: one at a time. Errors: PlanError where lengths do not match, a number
// is negative, infinite or NaN, a segment has no device or waits for a later one, or devices,
// paces or times given to a method do not fit.
class DeviceSearch {
 public:
  explicit DeviceSearch(SegmentGraph graph);

  // The objective of an execution on these devices.
  double value(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
               ChoiceObjective objective);
  // When each device has ended an execution on these devices, and earlier ones.
  const std::vector<double>& freed(const std::vector<std::int64_t>& devices,
                                   const DeviceLoads& loads);

  // Gives each segment in turn to the device with its earliest expected end, including the copies
  // of what it reads that is neither there nor on its way, and of what the caller takes. The first
  // of equal devices.
  //
  // Source: the policy dmda of StarPU, of C. Augonnet, J. Clet-Ortega, S. Thibault and R. Namyst,
  // "Data-Aware Task Scheduling on Multi-Accelerator based Platforms", ICPADS 2010. It too counts
  // no copy that is there or requested (starpu_data_expected_transfer_time,
  // core/perfmodel/perfmodel.c).
  std::vector<std::int64_t> earliest(const DeviceLoads& loads);

  // Begins a search from these choices, `earliest`, and all segments on one device: `found` is the
  // best of them.
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

  bool can_run(std::size_t segment, std::size_t device) const {
    return graph_.costs_ns[segment * graph_.n_devices + device] >= 0;
  }
  void check_graph() const;
  void check_numbers() const;
  void check_values() const;
  void check_choice(const std::vector<std::int64_t>& devices) const;
  void check_loads(const DeviceLoads& loads) const;
  void lay_out_neighbours();
  std::vector<std::int64_t> all_on(std::size_t device,
                                   const std::vector<std::int64_t>& otherwise) const;
  void restart();
  bool apply(const Neighbour& one, std::vector<std::int64_t>& devices) const;

  double copy_ns(std::size_t from, std::size_t to, double size_bytes) const;
  // A segment is ready, or has ended. The heap's first is the earliest; of equal ones the lowest.
  struct Event {
    double ns;
    std::uint32_t segment;
    bool has_ended;
    bool operator<(const Event& other) const {
      return ns != other.ns ? ns > other.ns : segment > other.segment;
    }
  };

  void add_event(const Event& event);
  void count_waits(const std::vector<std::int64_t>& devices);
  void arrive(std::uint32_t segment, double ns);
  double evaluated(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
                   ChoiceObjective objective);
  void send(std::int64_t producer, double ended_ns, const std::vector<std::int64_t>& devices);
  double arrival_at(std::size_t segment, std::size_t device, bool is_kept);
  double end_at(std::size_t segment, std::size_t device, const std::vector<std::int64_t>& devices,
                const DeviceLoads& loads);
  double returning_ns(std::size_t segment, std::size_t device) const;

  SegmentGraph graph_;
  std::size_t n_segments_;
  std::size_t n_memories_;
  std::vector<std::vector<std::uint32_t>> made_;    // by producer + 1, its SharedValues
  std::vector<std::vector<std::uint32_t>> read_;    // by segment, the SharedValues
  std::vector<std::vector<std::uint32_t>> behind_;  // by segment, those that wait for it
  std::vector<Neighbour> neighbours_;

  // Of the latest evaluation.
  std::vector<double> ends_ns_, free_ns_, busy_ns_, arrivals_ns_;
  std::vector<std::size_t> waits_;
  std::vector<Event> events_;
  std::vector<double> link_free_ns_, link_busy_ns_;  // from memory * n_memories + to memory
  double returned_ns_ = 0;

  // Of `earliest`: where and when the copies of values arrive, by value * n_memories + memory.
  std::vector<double> present_ns_, attempt_link_ns_;
  std::vector<std::size_t> origin_of_;  // by producer + 1, its memory

  // Of the search.
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
