#include "cuda/streamed_graph.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

constexpr std::size_t kLargestNodeBytes = std::size_t{256} << 20;
constexpr const char* kFollowing = "letting the copy of a weight read its new content";

Memcpy3D copy_params(std::uint64_t to, const std::byte* from, std::size_t n_bytes) {
  Memcpy3D params = {};
  params.source_type = kMemoryHost;
  params.source_host = from;
  params.destination_type = kMemoryDevice;
  params.destination_device = to;
  params.source_pitch = params.destination_pitch = n_bytes;
  params.source_height = params.destination_height = 1;
  params.width_bytes = n_bytes;
  params.height = params.depth = 1;
  return params;
}

}  // namespace

// Adds copies to a graph.
class CopyBuilder {
 public:
  CopyBuilder(const Driver& driver, Graph graph, const std::vector<GraphNode>& nodes,
              Context context)
      : driver_(driver), graph_(graph), nodes_(nodes), context_(context) {}

  void add(const StreamedCopy& place, const WeightCopy& copy) {
    std::vector<GraphNode> after = named(place.after);
    std::uint64_t to = copy.to;
    for (std::size_t run = 0; run < copy.runs.size(); ++run) {
      const StoredBytes& stored = copy.runs[run];
      for (std::size_t at = 0; at < stored.size_bytes; at += kLargestNodeBytes) {
        const std::size_t n_bytes = std::min(kLargestNodeBytes, stored.size_bytes - at);
        if (last_ != nullptr) after.push_back(last_);
        last_ = add_node(to + at, stored.from + at, n_bytes, after);
        after.clear();
        copies_.parts_.push_back(
            {last_, place.transfer, run, at, to + at, n_bytes, stored.from + at});
      }
      to += stored.size_bytes;
    }
    const std::vector<GraphNode> before = named(place.before);
    const std::vector<GraphNode> from(before.size(), last_);
    const std::vector<EdgeData> data(before.size());
    if (before.empty()) return;
    driver_.check(driver_.graph_add_dependencies(graph_, from.data(), before.data(), data.data(),
                                                 before.size()),
                  "letting launches wait for a weight");
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

  CopyNodes take() { return std::move(copies_); }

 private:
  GraphNode add_node(std::uint64_t to, const std::byte* from, std::size_t n_bytes,
                     const std::vector<GraphNode>& after) {
    const Memcpy3D params = copy_params(to, from, n_bytes);
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
  CopyNodes copies_;
  std::size_t n_added_ = 0;
};

namespace {

// Checks that every transfer appears once. A launch with empty results may have no node, so that no
// node waits for a copy of this execution.
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
  if (streamed.copies.empty()) return {};
  CopyBuilder builder(driver, graph, nodes, context);
  for (const StreamedCopy& copy : streamed.copies) {
    builder.add(copy, weights.copies()[copy.transfer]);
  }
  builder.add_event(streamed.ready_after, weights.ready());
  builder.check_count();
  return builder.take();
}

std::vector<std::pair<GraphNode, GraphNode>> CopyNodes::ends() const {
  std::vector<std::pair<GraphNode, GraphNode>> found;
  for (std::size_t index = 0; index < parts_.size(); ++index) {
    const bool begins = index == 0 || parts_[index].transfer != parts_[index - 1].transfer;
    if (begins) found.emplace_back(parts_[index].node, nullptr);
    found.back().second = parts_[index].node;
  }
  return found;
}

bool CopyNodes::follow(const Driver& driver, GraphExec exec, const CudaWeightStream& weights,
                       Context context) {
  bool has_moved = false;
  for (Part& part : parts_) {
    const StoredBytes& run = weights.copies()[part.transfer].runs[part.run];
    const std::byte* const from = run.from + part.offset_bytes;
    if (from == part.from) continue;
    const Memcpy3D params = copy_params(part.to, from, part.n_bytes);
    part.from = nullptr;  // unknown until all calls have succeeded
    driver.check(driver.graph_memcpy_set_params(part.node, &params), kFollowing);
    if (exec != nullptr) {
      driver.check(driver.graph_exec_memcpy_set_params(exec, part.node, &params, context),
                   kFollowing);
    }
    part.from = from;
    has_moved = true;
  }
  return has_moved;
}

}  // namespace offload::cuda
