// Predicted executions of the segments of a placed Program, from costs, paces and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
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

// What an execution has done at time 0. Empty vectors: nothing has begun.
struct SegmentProgress {
  std::vector<double> ends_ns;       // by segment: when it ends (0: it has); or kNotBegun
  std::vector<double> present_ns;    // by value * n_memories + memory: when it is there, apart from
                                     // where it is made; or kNotThere
  std::vector<double> link_free_ns;  // from memory * n_memories + to memory
};

inline constexpr double kNotBegun = -1;
inline constexpr double kNotThere = -1;

enum class ChoiceObjective : std::int64_t {
  kLatency,     // when the last segment or copy for the caller has ended
  kThroughput,  // the time of the busiest device or direction between two memories
};

// Predicts executions of one SegmentGraph.
//
// A value is copied once to each memory in which it is read; what one producer sends to one memory
// is one copy, which begins when the producer has ended. A direction between two memories carries
// one copy at a time.
//
// Owner: one caller. Thread: one at a time. Errors: the constructor throws PlanError where lengths
// do not match, a number is negative, infinite or NaN, or a segment has no device or waits for a
// later one; the checks and `earliest` throw it where devices, paces or times do not fit, and
// `value` takes what passes the checks.
class SegmentPrediction {
 public:
  explicit SegmentPrediction(SegmentGraph graph);

  const SegmentGraph& graph() const { return graph_; }
  std::size_t n_segments() const { return n_segments_; }
  bool can_run(std::size_t segment, std::size_t device) const {
    return graph_.costs_ns[segment * graph_.n_devices + device] >= 0;
  }
  void check_choice(const std::vector<std::int64_t>& devices) const;
  void check_loads(const DeviceLoads& loads) const;

  // The objective of an execution on these devices, which are those of what has begun.
  double value(const std::vector<std::int64_t>& devices, const DeviceLoads& loads,
               ChoiceObjective objective, const SegmentProgress& progress = {});
  // When each device has ended the execution of the latest `value`, and earlier ones.
  const std::vector<double>& freed_ns() const { return free_ns_; }

  // Gives each segment in turn to the device with its earliest expected end, including the copies
  // of what it reads that is neither there nor on its way, and of what the caller takes. The first
  // of equal devices.
  //
  // Source: the policy dmda of StarPU, of C. Augonnet, J. Clet-Ortega, S. Thibault and R. Namyst,
  // "Data-Aware Task Scheduling on Multi-Accelerator based Platforms", ICPADS 2010. It too counts
  // no copy that is there or requested (starpu_data_expected_transfer_time,
  // core/perfmodel/perfmodel.c).
  // `devices`: of what has begun, which stays there.
  std::vector<std::int64_t> earliest(const DeviceLoads& loads,
                                     const std::vector<std::int64_t>& devices = {},
                                     const SegmentProgress& progress = {});

  // The earliest ends, and then all segments on one device after another, as far as it has them;
  // what has begun stays on `devices`.
  std::vector<std::vector<std::int64_t>> alternatives(const DeviceLoads& loads,
                                                      const std::vector<std::int64_t>& devices = {},
                                                      const SegmentProgress& progress = {});

  std::size_t n_memories() const { return n_memories_; }
  // The values that a segment, or kCaller, makes, as indices of the graph's values.
  const std::vector<std::uint32_t>& made(std::int64_t producer) const {
    return made_[static_cast<std::size_t>(producer + 1)];
  }
  // The values that a segment reads, and the segments that wait for it.
  const std::vector<std::uint32_t>& read(std::size_t segment) const { return read_[segment]; }
  const std::vector<std::uint32_t>& behind(std::size_t segment) const { return behind_[segment]; }
  double copy_ns(std::size_t from, std::size_t to, double size_bytes) const;

 private:
  // A segment is ready, or has ended. The heap's first is the earliest; of equal ones the lowest.
  struct Event {
    double ns;
    std::uint32_t segment;
    bool has_ended;
    bool operator<(const Event& other) const {
      return ns != other.ns ? ns > other.ns : segment > other.segment;
    }
  };

  void check_graph() const;
  void check_numbers() const;
  void check_values() const;
  bool has_begun(std::size_t segment) const;
  void begin(const DeviceLoads& loads, const SegmentProgress& progress);
  void add_event(const Event& event);
  void count_waits(const std::vector<std::int64_t>& devices);
  void arrive(std::uint32_t segment, double ns);
  void send(std::int64_t producer, double ended_ns, const std::vector<std::int64_t>& devices);
  void tell_readers(const SharedValues& one, std::size_t to, double ns,
                    const std::vector<std::int64_t>& devices);
  double arrival_at(std::size_t segment, std::size_t device, bool is_kept);
  double end_at(std::size_t segment, std::size_t device, const std::vector<std::int64_t>& devices,
                const DeviceLoads& loads);
  std::pair<std::size_t, double> earliest_at(std::size_t segment,
                                             const std::vector<std::int64_t>& devices,
                                             const DeviceLoads& loads);
  double returning_ns(std::size_t segment, std::size_t device) const;

  SegmentGraph graph_;
  std::size_t n_segments_;
  std::size_t n_memories_;
  std::vector<std::vector<std::uint32_t>> made_;    // by producer + 1, its SharedValues
  std::vector<std::vector<std::uint32_t>> read_;    // by segment, the SharedValues
  std::vector<std::vector<std::uint32_t>> behind_;  // by segment, those that wait for it

  // Of the latest evaluation.
  const SegmentProgress* progress_ = nullptr;
  std::vector<double> ends_ns_, free_ns_, busy_ns_, arrivals_ns_;
  std::vector<std::size_t> waits_;
  std::vector<Event> events_;
  std::vector<double> link_free_ns_, link_busy_ns_;  // from memory * n_memories + to memory
  double returned_ns_ = 0;

  // Of `earliest`: where and when the copies of values arrive, by value * n_memories + memory.
  std::vector<double> present_ns_, attempt_link_ns_;
  std::vector<std::size_t> origin_of_;  // by producer + 1, its memory
};

}  // namespace offload
