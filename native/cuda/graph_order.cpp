#include "cuda/graph_order.hpp"

#include <functional>
#include <map>
#include <queue>

namespace offload::cuda {

std::vector<std::pair<GraphNode, GraphNode>> edges_of(const Driver& driver, Graph graph) {
  std::size_t n_edges = 0;
  driver.check(driver.graph_get_edges(graph, nullptr, nullptr, nullptr, &n_edges),
               "counting the graph's edges");
  std::vector<GraphNode> from(n_edges);
  std::vector<GraphNode> to(n_edges);
  std::vector<EdgeData> data(n_edges);
  if (n_edges > 0) {
    driver.check(driver.graph_get_edges(graph, from.data(), to.data(), data.data(), &n_edges),
                 "reading the graph's edges");
  }
  std::vector<std::pair<GraphNode, GraphNode>> edges;
  for (std::size_t edge = 0; edge < n_edges; ++edge) edges.emplace_back(from[edge], to[edge]);
  return edges;
}

std::vector<GraphNode> nodes_in_clone(const Driver& driver, Graph clone,
                                      const std::vector<GraphNode>& originals) {
  std::vector<GraphNode> found;
  for (const GraphNode original : originals) {
    GraphNode node = nullptr;
    driver.check(driver.graph_node_find_in_clone(&node, original, clone),
                 "finding a node in the clone of a graph");
    found.push_back(node);
  }
  return found;
}

std::vector<std::size_t> order_of(const Driver& driver, Graph graph,
                                  const std::vector<GraphNode>& nodes) {
  std::map<GraphNode, std::size_t> index_of;
  for (std::size_t node = 0; node < nodes.size(); ++node) index_of[nodes[node]] = node;
  std::vector<std::vector<std::size_t>> after(nodes.size());
  std::vector<std::size_t> n_before(nodes.size());
  for (const auto& [from, to] : edges_of(driver, graph)) {
    const std::size_t target = index_of.at(to);
    after[index_of.at(from)].push_back(target);
    ++n_before[target];
  }
  std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    if (n_before[node] == 0) ready.push(node);
  }
  std::vector<std::size_t> order;
  while (!ready.empty()) {
    const std::size_t node = ready.top();
    ready.pop();
    order.push_back(node);
    for (const std::size_t next : after[node]) {
      if (--n_before[next] == 0) ready.push(next);
    }
  }
  return order;
}

}  // namespace offload::cuda
