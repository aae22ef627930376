#include "cuda/streamed_graph.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

constexpr std::size_t kLargestNodeBytes = std::size_t{256} << 20;

// One graph while copies are added to it.
class Builder {
 public:
  Builder(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes, Context context)
      : driver_(driver), graph_(graph), nodes_(nodes), context_(context) {}

  // Gives its first and its last node.
  std::pair<GraphNode, GraphNode> add(const StreamedCopy& place, const WeightCopy& copy) {
    GraphNode first = nullptr;
    std::vector<GraphNode> after = named(place.after);
    for (std::size_t at = 0; at < copy.size_bytes; at += kLargestNodeBytes) {
      if (last_ != nullptr) after.push_back(last_);
      last_ = add_node(copy, at, std::min(kLargestNodeBytes, copy.size_bytes - at), after);
      if (first == nullptr) first = last_;
      after.clear();
    }
    const std::vector<GraphNode> before = named(place.before);
    const std::vector<GraphNode> from(before.size(), last_);
    const std::vector<EdgeData> data(before.size());
    if (before.empty()) return {first, last_};
    driver_.check(driver_.graph_add_dependencies(graph_, from.data(), before.data(), data.data(),
                                                 before.size()),
                  "letting launches wait for a weight");
    return {first, last_};
  }

  void add_event(const std::vector<std::uint32_t>& after, Event event) {
    const std::vector<GraphNode> ends = named(after);
    GraphNode node = nullptr;
    driver_.check(
        driver_.graph_add_event_record_node(&node, graph_, ends.data(), ends.size(), event),
        "adding an event to the graph");
    ++n_added_;
  }

  void check_count() const {
    std::size_t n_nodes = 0;
    driver_.check(driver_.graph_get_nodes(graph_, nullptr, &n_nodes), "counting the graph's nodes");
    if (n_nodes == nodes_.size() + n_added_) return;
    throw ExecutionError("the graph with copies of weights has " + std::to_string(n_nodes) +
                         " nodes, expected " + std::to_string(nodes_.size()) + " captured and " +
                         std::to_string(n_added_) + " added");
  }

 private:
  GraphNode add_node(const WeightCopy& copy, std::size_t at, std::size_t n_bytes,
                     const std::vector<GraphNode>& after) {
    Memcpy3D params = {};
    params.source_type = kMemoryHost;
    params.source_host = copy.from + at;
    params.destination_type = kMemoryDevice;
    params.destination_device = copy.to + at;
    params.source_pitch = params.destination_pitch = n_bytes;
    params.source_height = params.destination_height = 1;
    params.width_bytes = n_bytes;
    params.height = params.depth = 1;
    GraphNode node = nullptr;
    driver_.check(
        driver_.graph_add_memcpy_node(&node, graph_, after.data(), after.size(), &params, context_),
        "adding the copy of a weight to the graph");
    ++n_added_;
    return node;
  }

  std::vector<GraphNode> named(const std::vector<std::uint32_t>& positions) const {
    std::vector<GraphNode> found;
    for (const std::uint32_t position : positions) {
      if (position >= nodes_.size()) {
        throw std::invalid_argument("a copy names a node that does not exist");
      }
      found.push_back(nodes_[position]);
    }
    return found;
  }

  const Driver& driver_;
  Graph graph_;
  const std::vector<GraphNode>& nodes_;
  Context context_;
  GraphNode last_ = nullptr;
  std::size_t n_added_ = 0;
};

// Every transfer stands once. A launch whose results are empty may have no node, so that nobody
// waits for a copy of this execution.
void check_transfers(const StreamedGraph& streamed, std::size_t n_transfers) {
  std::vector<bool> is_there(n_transfers);
  for (const StreamedCopy& copy : streamed.copies) {
    const bool is_new = copy.transfer < n_transfers && !is_there[copy.transfer];
    if (!is_new || (copy.for_next_pass && !copy.before.empty())) {
      throw std::invalid_argument("transfer " + std::to_string(copy.transfer) +
                                  " does not exist, stands twice, or is read before it comes");
    }
    is_there[copy.transfer] = true;
  }
  if (streamed.copies.size() != n_transfers) {
    throw std::invalid_argument("expected " + std::to_string(n_transfers) + " transfers, got " +
                                std::to_string(streamed.copies.size()));
  }
}

}  // namespace

CopyNodes add_copies(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes,
                     const StreamedGraph& streamed, const CudaWeightStream& weights,
                     Context context) {
  check_transfers(streamed, weights.copies().size());
  CopyNodes added;
  if (streamed.copies.empty()) return added;
  Builder builder(driver, graph, nodes, context);
  for (const StreamedCopy& copy : streamed.copies) {
    const auto [first, last] = builder.add(copy, weights.copies()[copy.transfer]);
    added.first.push_back(first);
    added.last.push_back(last);
  }
  builder.add_event(streamed.ready_after, weights.ready());
  builder.check_count();
  return added;
}

}  // namespace offload::cuda
