// A graph that streams weights, with events that tell when its copies ran and what waited for them.
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

// What a timed graph is a copy of. All of it is only read, by the constructor.
struct TimedTemplate {
  Graph graph = nullptr;               // with its copies
  std::vector<GraphNode> nodes;        // the captured ones, in it
  std::vector<std::int64_t> launches;  // of the Program, by node; -1: none
  const StreamedGraph& streamed;
  const CopyNodes& copies;
};

// A clone of a resident graph and its instantiation. Beside all nodes and edges of the template it
// has nodes that record an event before and behind each copy, one before each launch that waits for
// a copy, where all else that it waits for has ended, and one where the outputs are ready. So it
// does the same in the same order; a launch that waits begins behind the end of what comes before
// it, also where an edge would let the two overlap.
//
// An execution's moments are those of the device's clock (cuEventElapsedTime, to half a
// microsecond), since the caller's stream came to it. That they lie where they do by the host's
// clock is known from the moment at which the host saw the outputs ready.
//
// Owner: one resident. Thread: callers serialise, with the device's context, past a capture of
// theirs. Errors: ExecutionError where the driver fails; the constructor leaves nothing behind
// then. It must not run when it is destroyed.
class TimedGraph final : public PassMarks {
 public:
  TimedGraph(const Driver& driver, const TimedTemplate& from, const CudaWeightStream& weights,
             Stream stream);

  GraphExec exec() const { return exec_.get(); }

  // Whether a node was last given another image than `parameters` hold, or none.
  bool is_changed(std::size_t node, const ResidentNode& parameters) const {
    return applied_[node] != parameters.image();
  }

  // Gives a node the image.
  Result set(std::size_t node, ResidentNode& parameters, Context context);

  // The image that a node was instantiated with.
  void note_applied(std::size_t node, const ResidentNode& parameters) {
    applied_[node] = parameters.image();
  }

  void before_pass(StreamAddress stream) override;
  void before_copy(std::size_t transfer) override;
  void behind_copy(std::size_t transfer) override;

  // Waits until the outputs of the latest pass are ready, and says when its copies ran and which
  // launches waited. What lies before the first launch is that launch's: a graph begins when the
  // last copies of the one before have ended.
  void report(PassReport& report);

 private:
  // A copy, and the events before and behind it.
  struct TimedCopy {
    std::size_t transfer = 0;
    bool for_next_pass = false;
    Event begin = nullptr;
    Event end = nullptr;
  };
  // A node that waits for copies, and the event where it waits for nothing else.
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
  std::deque<Held<Event>> events_;  // they do not move
  Held<Graph> graph_;
  Held<GraphExec> exec_;
  std::size_t n_added_ = 0;
  std::vector<GraphNode> nodes_;                     // the captured ones, in the clone
  std::vector<std::vector<unsigned char>> applied_;  // by node
  std::vector<TimedCopy> copies_;
  std::vector<WaitingNode> waiting_;
  std::size_t first_launch_ = 0;  // that has a node
  Event outputs_ready_ = nullptr;
  Event arrivals_[2] = {};           // of the caller's stream, in turn
  std::size_t turn_ = 0;             // of the latest pass
  Event lane_free_ = nullptr;        // behind the copies of the pass before
  std::vector<TimedCopy> prologue_;  // events of it, by for_next_pass copy
  std::size_t n_in_prologue_ = 0;    // copies of it in the latest pass
  std::int64_t arrival_ns_ = 0;      // of the latest pass, by the host's clock
  bool last_copies_run_ = false;     // when the latest report was made
  std::optional<double> early_ns_;   // what the last copies of the pass before took
  std::vector<TransferTime> late_;   // they ended behind its report
};

}  // namespace offload::cuda
