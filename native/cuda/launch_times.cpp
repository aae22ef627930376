#include "cuda/launch_times.hpp"

#include <cstddef>
#include <deque>

#include "cuda/graph_order.hpp"
#include "cuda/held.hpp"

namespace offload::cuda {
namespace {

constexpr double kNsInMs = 1e6;

// A clone of a graph, with events added between its launches.
class Timed {
 public:
  Timed(const Driver& driver, Graph graph) : driver_(driver), graph_(driver.graph_destroy) {
    driver_.check(driver_.graph_clone(graph_.fill(), graph), "cloning a graph to time");
    add_event({});
  }

  // Adds nodes, given as those of the original graph.
  void add(const std::vector<GraphNode>& originals) {
    const std::vector<GraphNode> nodes = nodes_in_clone(driver_, graph_.get(), originals);
    const std::vector<GraphNode> from(nodes.size(), last_);
    const std::vector<EdgeData> data(nodes.size());
    driver_.check(driver_.graph_add_dependencies(graph_.get(), from.data(), nodes.data(),
                                                 data.data(), nodes.size()),
                  "letting a launch wait for the one before");
    add_event(nodes);
  }

  void execute() {
    Held<GraphExec> exec(driver_.graph_exec_destroy);
    const OwnStream stream(driver_);
    driver_.check(driver_.graph_instantiate(exec.fill(), graph_.get(), 0),
                  "instantiating a graph to time");
    driver_.check(driver_.graph_upload(exec.get(), stream.handle()), "uploading a graph to time");
    driver_.check(driver_.graph_launch(exec.get(), stream.handle()), "launching a graph to time");
    driver_.check(driver_.stream_synchronize(stream.handle()), "timing launches");
  }

  // The time between an event and the next.
  double elapsed_ns(std::size_t event) const {
    float milliseconds = 0;
    driver_.check(
        driver_.event_elapsed_time(&milliseconds, events_[event].get(), events_[event + 1].get()),
        "timing launches");
    return static_cast<double>(milliseconds) * kNsInMs;
  }

 private:
  void add_event(const std::vector<GraphNode>& after) {
    Held<Event>& event = events_.emplace_back(driver_.event_destroy);
    driver_.check(driver_.event_create(event.fill(), kEventWithTimes), "making an event");
    driver_.check(driver_.graph_add_event_record_node(&last_, graph_.get(), after.data(),
                                                      after.size(), event.get()),
                  "adding an event to a graph to time");
  }

  const Driver& driver_;
  std::deque<Held<Event>> events_;  // stable addresses
  Held<Graph> graph_;
  GraphNode last_ = nullptr;
};

}  // namespace

std::vector<double> time_launches(const Driver& driver, Graph graph,
                                  const std::vector<std::vector<GraphNode>>& launches) {
  Timed timed(driver, graph);
  for (const std::vector<GraphNode>& nodes : launches) {
    if (!nodes.empty()) timed.add(nodes);
  }
  timed.execute();
  std::vector<double> times_ns;
  std::size_t event = 0;
  for (const std::vector<GraphNode>& nodes : launches) {
    times_ns.push_back(nodes.empty() ? 0.0 : timed.elapsed_ns(event++));
  }
  return times_ns;
}

}  // namespace offload::cuda
