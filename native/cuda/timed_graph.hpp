// A graph that streams weights, with events that show when its copies ran and what waited for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/cuda_weight_stream.hpp"
#include "cuda/held.hpp"
#include "cuda/resident_node.hpp"
#include "cuda/streamed_graph.hpp"

namespace offload::cuda {

// What a timed graph is copied from; only read, by the constructor.
struct TimedTemplate {
  Graph graph = nullptr;               // with its copies
  std::vector<GraphNode> nodes;        // the captured ones, in it
  std::vector<std::int64_t> launches;  // of the Program, by node; -1: no launch
  const StreamedGraph& streamed;
  const CopyNodes& copies;
};

// A clone of a resident graph and its instantiation. In addition to all nodes and edges of the
// template, it records an event before and after each copy, one before each launch that waits for a
// copy (once all else that it waits for has ended), and one when the outputs are ready. It
// therefore does the same work in the same order; but a launch that waits begins after the end of
// what precedes it, even where an edge would let the two overlap.
//
// Times of an execution are by the device's clock (cuEventElapsedTime, to half a microsecond), from
// when the caller's stream reached it. They are mapped to the host's clock by the time at which the
// host saw the outputs ready.
//
// Owner: one resident. Thread: callers serialise, with the device's context and captures relaxed.
// Errors: ExecutionError where the driver fails; the constructor then leaves nothing behind. It
// must not be running when it is destroyed.
class TimedGraph final : public PassMarks {
 public:
  TimedGraph(const Driver& driver, const TimedTemplate& from, const CudaWeightStream& weights,
             Stream stream);

  GraphExec exec() const { return exec_.get(); }

  // Whether a node's last image differs from that of `parameters`, or it has none.
  bool is_changed(std::size_t node, const ResidentNode& parameters) const {
    return applied_[node] != parameters.image();
  }

  // Sets a node to the image of `parameters`.
  Result set(std::size_t node, ResidentNode& parameters, Context context);

  // Records the image with which a node was instantiated.
  void note_applied(std::size_t node, const ResidentNode& parameters) {
    applied_[node] = parameters.image();
  }

  void before_pass(StreamAddress stream) override;
  void before_copy(std::size_t transfer) override;
  void behind_copy(std::size_t transfer) override;

  // Waits until the outputs of the latest pass are ready, and reports when its copies ran and which
  // launches waited. Time before the first launch counts as its wait: a graph begins when the last
  // copies of the one before have ended.
  void report(PassReport& report);

 private:
  // A copy, and the events before and after it.
  struct TimedCopy {
    std::size_t transfer = 0;
    bool for_next_pass = false;
    Event begin = nullptr;
    Event end = nullptr;
  };
  // A node that waits for copies, and the event after which it waits for nothing else.
  struct WaitingNode {
    std::size_t launch = 0;
    Event ready = nullptr;
    std::vector<std::size_t> copies;
  };
  using Interval = std::pair<double, double>;

  GraphNode add_event(const std::vector<GraphNode>& after, Event& event);
  void depend(const std::vector<GraphNode>& from, const std::vector<GraphNode>& to);
  void add_copies(const TimedTemplate& from);
  void add_waits(const TimedTemplate& from);
  void check_count(const TimedTemplate& from) const;
  Event new_event();

  std::optional<double> moment_ns(Event event) const;
  double ended_ns(Event event) const;
  std::uint64_t host_ns(double moment_ns) const;
  TransferTime transfer_time(const TimedCopy& copy, double begin_ns, double end_ns) const;
  void report_copies(PassReport& report);
  void report_waits(PassReport& report) const;
  void finish_last_copies();

  const Driver& driver_;
  const CudaWeightStream& weights_;
  std::deque<Held<Event>> events_;  // stable addresses
  Held<Graph> graph_;
  Held<GraphExec> exec_;
  std::size_t n_added_ = 0;
  std::vector<GraphNode> nodes_;                     // the captured ones, in the clone
  std::vector<std::vector<unsigned char>> applied_;  // by node
  std::vector<TimedCopy> copies_;
  std::vector<WaitingNode> waiting_;
  std::size_t first_launch_ = 0;  // the first with a node
  Event outputs_ready_ = nullptr;
  Event arrivals_[2] = {};           // of the caller's stream, alternating
  std::size_t turn_ = 0;             // of the latest pass
  Event lane_free_ = nullptr;        // after the copies of the pass before
  std::vector<TimedCopy> prologue_;  // its events, by for_next_pass copy
  std::size_t n_in_prologue_ = 0;    // its copies in the latest pass
  std::int64_t arrival_ns_ = 0;      // of the latest pass, by the host's clock
  bool last_copies_run_ = false;     // at the latest report
  std::optional<double> early_ns_;   // duration of the last copies of the pass before
  std::vector<TransferTime> late_;   // those that ended after its report
};

}  // namespace offload::cuda
