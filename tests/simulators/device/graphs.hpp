// Graphs of work, and their executables, which have separate parameters.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "memory.hpp"
#include "registry.hpp"
#include "work.hpp"

namespace simulator {

struct Graph;
struct Mark;

// How much of the preceding node must have ended: all of it, where these are zeros.
struct EdgeKind {
  std::uint8_t from_port = 0;
  std::uint8_t to_port = 0;
  std::uint8_t type = 0;
  bool is_plain() const { return from_port == 0 && to_port == 0 && type == 0; }
  bool operator==(const EdgeKind& other) const {
    return from_port == other.from_port && to_port == other.to_port && type == other.type;
  }
};

// Owner: its graph, which must outlive all pointers to it.
struct Node {
  std::uint64_t handle = 0;
  std::uint64_t graph = 0;
  std::uint64_t original = 0;  // in the graph that this is a clone of
  Work work;
  std::vector<std::uint64_t> dependencies;
  std::map<std::uint64_t, EdgeKind> edge_kinds;  // by dependency; plain ones may be absent
  // Storage for the results of a skin's getters; valid until the node's parameters are set.
  std::vector<void*> addresses;
  std::array<void*, 5> packing{};
  std::size_t packed_bytes = 0;
};

struct Graph {
  std::uint64_t handle = 0;
  std::vector<std::shared_ptr<Node>> nodes;  // in the order in which they were added
};

// A node in an executable. Immutable: a new one replaces it, so that earlier launches keep theirs.
struct Step {
  Work work;
  // Ids of the allocations that the operands of a copy or fill lay in when they were set.
  std::vector<std::uint64_t> held_source, held_destination;
};

struct GraphRun {
  std::vector<std::shared_ptr<const Step>> steps;
  std::vector<std::size_t> order;
  std::size_t next = 0;                                // in the order: the next to run
  std::vector<std::vector<std::size_t>> dependencies;  // by step; none of a child graph's
  std::vector<std::int64_t> ended_ns;                  // by step, on the virtual clock
  std::int64_t begin_ns = 0;
  std::map<std::uint64_t, std::shared_ptr<Mark>> marks;  // of this launch, by the event
};

// The order of graph nodes that edges leave unordered: last added first, so that a missing edge
// shows; first added first; or random, different at each launch.
enum class NodeOrder { kNewestFirst, kOldestFirst, kRandom };

struct Executable {
  std::uint64_t handle = 0;
  std::uint64_t graph = 0;                       // that it was made from
  std::map<std::uint64_t, std::size_t> step_of;  // by the node's handle
  // For kernels that may begin before the preceding one has ended: their work before the wait for
  // it.
  std::map<std::uint64_t, std::size_t> prologue_of;
  GraphRun run;
  std::vector<std::vector<std::size_t>> dependencies;  // by step
  std::shared_ptr<Mark> last;  // of its last launch: launches of one executable do not overlap
};

// Owner: the device. Thread: under the device's mutex. Errors: DeviceError, kInvalidValue for every
// unknown or destroyed handle, and as each function says.
class Graphs {
 public:
  explicit Graphs(Memory& memory) : memory_(memory) {}

  std::shared_ptr<Graph> create() { return graphs_.add(std::make_shared<Graph>()); }
  void destroy(std::uint64_t graph);
  std::shared_ptr<Graph> graph(std::uint64_t handle) const;
  std::shared_ptr<Node> node(std::uint64_t handle) const;
  std::shared_ptr<Executable> executable(std::uint64_t handle) const;

  // Errors: a dependency in another graph.
  std::shared_ptr<Node> add(Graph& graph, Work work, std::vector<std::uint64_t> dependencies);
  // Errors: nodes of different graphs, or an edge that is there already.
  void depend(Node& node, const Node& before, EdgeKind kind = {});
  // Errors: no such edge of this kind.
  void undepend(Node& node, const Node& before, EdgeKind kind = {});
  // Errors: work of another kind than the node's.
  void set(Node& node, Work work);
  std::shared_ptr<Graph> clone(const Graph& graph);
  // Errors: a graph that is not a clone of the node's graph.
  std::shared_ptr<Node> find_in_clone(const Node& original, const Graph& clone) const;

  // Errors: an operand that is not allocated.
  std::shared_ptr<Executable> instantiate(const Graph& graph);
  void destroy_executable(std::uint64_t handle);
  // Whether an executable of the graph exists.
  bool is_instantiated(const Graph& graph) const;
  // The executable's next launches run `work` for this node. Errors: a node of another graph, of a
  // destroyed graph, or of another kind; for copies and fills also an operand that is not
  // allocated, operands of another kind of memory than before, several dimensions before or now,
  // and zero bytes.
  void set(Executable& executable, const Node& node, Work work);

  // For the next launch of the executable.
  std::vector<std::size_t> order(const Executable& executable);
  void set_node_order(NodeOrder order, std::uint64_t seed);

  // Whether plain and mapped memory count as different kinds of memory for set(), as they do by
  // default: the assumption for a driver without documentation of it.
  void set_strict_kinds(bool strict) { strict_kinds_ = strict; }
  // False if memory of the step's operands was freed or mapped anew since they were set.
  bool holds(const Step& step) const;
  // Errors: a side that is device memory but not allocated.
  void validate(const Work& work) const;

  std::size_t n_graphs() const { return graphs_.size(); }
  std::size_t n_executables() const { return executables_.size(); }

  // Device memory of executables, for each of their nodes.
  void set_node_bytes(std::size_t n_bytes) { node_bytes_ = n_bytes; }
  std::size_t executable_bytes() const;
  void reset();

 private:
  std::shared_ptr<const Step> make_step(Work work) const;
  void add_prologues(const Graph& graph, Executable& executable) const;
  std::vector<std::uint64_t> held(const Operand& operand, std::size_t n_bytes) const;
  void require_same_kinds(const Step& before, const Step& after) const;
  MemoryKind kind_at(std::uint64_t address) const;

  Memory& memory_;
  Registry<Graph> graphs_;
  Registry<Node> nodes_;
  Registry<Executable> executables_;
  std::size_t node_bytes_ = 0;
  bool strict_kinds_ = true;
  NodeOrder node_order_ = NodeOrder::kNewestFirst;
  std::mt19937_64 random_;
};

}  // namespace simulator
