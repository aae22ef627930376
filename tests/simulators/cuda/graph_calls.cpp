// Graphs, their nodes and executables.
#include <algorithm>
#include <cstring>

#include "convert.hpp"
#include "driver.hpp"

namespace simulated_cuda {

using simulator::Copy;
using simulator::Fill;
using simulator::HostCall;
using simulator::KernelCall;
using simulator::Status;

namespace {

// The node's work. Errors: kInvalidValue for an unknown node or work of another kind.
template <class Kind>
Kind& work_of(simulator::Device& device, GraphNode node) {
  auto* const work = std::get_if<Kind>(&device.graphs.node(as_number(node))->work);
  simulator::require(work != nullptr, Status::kInvalidValue);
  return *work;
}

std::shared_ptr<simulator::Graph> get(simulator::Device& device, Graph graph) {
  return device.graphs.graph(as_number(graph));
}

std::shared_ptr<simulator::Node> get(simulator::Device& device, GraphNode node) {
  return device.graphs.node(as_number(node));
}

EdgeData data_of(const simulator::Node& node, std::uint64_t before) {
  const auto found = node.edge_kinds.find(before);
  if (found == node.edge_kinds.end()) return {};
  return {found->second.from_port, found->second.to_port, found->second.type, {}};
}

// A query without edge data fails for edges with data: "Some edges may not be described by data"
// (cuGraphGetEdges and cuGraphNodeGetDependencies of the driver's manual).
bool is_lossy(const simulator::Node& node, const GraphNode* asked, const EdgeData* data) {
  return asked != nullptr && data == nullptr && !node.edge_kinds.empty();
}

}  // namespace

Result graph_create(Graph* graph, unsigned int flags) {
  return call("cuGraphCreate", Needs::kDriver, [&](simulator::Device& device) {
    require_given(graph);
    simulator::require(flags == 0, Status::kInvalidValue);
    *graph = as_handle<Graph>(device.graphs.create()->handle);
  });
}

Result graph_destroy(Graph graph) {
  return call("cuGraphDestroy", Needs::kDriver,
              [&](simulator::Device& device) { device.graphs.destroy(as_number(graph)); });
}

Result graph_clone(Graph* clone, Graph original) {
  return call("cuGraphClone", Needs::kDriver, [&](simulator::Device& device) {
    require_given(clone);
    *clone = as_handle<Graph>(device.graphs.clone(*get(device, original))->handle);
  });
}

Result graph_node_find_in_clone(GraphNode* node, GraphNode original, Graph clone) {
  return call("cuGraphNodeFindInClone", Needs::kDriver, [&](simulator::Device& device) {
    require_given(node);
    const auto found = device.graphs.find_in_clone(*get(device, original), *get(device, clone));
    *node = as_handle<GraphNode>(found->handle);
  });
}

Result graph_get_nodes(Graph graph, GraphNode* nodes, std::size_t* n_nodes) {
  return call("cuGraphGetNodes", Needs::kDriver, [&](simulator::Device& device) {
    require_given(n_nodes);
    const auto found = get(device, graph);
    const std::size_t room = nodes == nullptr ? 0 : *n_nodes;
    for (std::size_t index = 0; index < room; ++index) {
      const bool exists = index < found->nodes.size();
      nodes[index] = exists ? as_handle<GraphNode>(found->nodes[index]->handle) : nullptr;
    }
    *n_nodes = nodes == nullptr ? found->nodes.size() : std::min(room, found->nodes.size());
  });
}

Result graph_get_edges(Graph graph, GraphNode* from, GraphNode* to, EdgeData* data,
                       std::size_t* n_edges) {
  bool lossy = false;
  const Result result = call("cuGraphGetEdges", Needs::kDriver, [&](simulator::Device& device) {
    require_given(n_edges);
    simulator::require((from == nullptr) == (to == nullptr), Status::kInvalidValue);
    for (const auto& node : get(device, graph)->nodes) lossy |= is_lossy(*node, from, data);
    if (lossy) return;
    const std::size_t room = from == nullptr ? 0 : *n_edges;
    std::size_t count = 0;
    for (const auto& node : get(device, graph)->nodes) {
      for (const std::uint64_t other : node->dependencies) {
        if (count < room) {
          from[count] = as_handle<GraphNode>(other);
          to[count] = as_handle<GraphNode>(node->handle);
          if (data != nullptr) data[count] = data_of(*node, other);
        }
        ++count;
      }
    }
    for (std::size_t index = count; index < room; ++index) from[index] = to[index] = nullptr;
    *n_edges = from == nullptr ? count : std::min(room, count);
  });
  return lossy ? kLossyQuery : result;
}

Result graph_node_get_dependencies(GraphNode node, GraphNode* dependencies, EdgeData* data,
                                   std::size_t* n_dependencies) {
  bool lossy = false;
  const auto work = [&](simulator::Device& device) {
    require_given(n_dependencies);
    simulator::require(data == nullptr || dependencies != nullptr, Status::kInvalidValue);
    const auto found = get(device, node);
    lossy = is_lossy(*found, dependencies, data);
    if (lossy) return;
    const std::size_t count = found->dependencies.size();
    const std::size_t room = dependencies == nullptr ? 0 : *n_dependencies;
    for (std::size_t index = 0; index < room; ++index) {
      const bool exists = index < count;
      dependencies[index] = exists ? as_handle<GraphNode>(found->dependencies[index]) : nullptr;
      if (data != nullptr) {
        data[index] = exists ? data_of(*found, found->dependencies[index]) : EdgeData{};
      }
    }
    *n_dependencies = dependencies == nullptr ? count : std::min(room, count);
  };
  const Result result = call("cuGraphNodeGetDependencies", Needs::kDriver, work);
  return lossy ? kLossyQuery : result;
}

Result graph_get_edges_v1(Graph graph, GraphNode* from, GraphNode* to, std::size_t* n_edges) {
  return graph_get_edges(graph, from, to, nullptr, n_edges);
}

Result graph_add_kernel_node(GraphNode* node, Graph graph, const GraphNode* dependencies,
                             std::size_t n_dependencies, const KernelNodeParams* params) {
  return call("cuGraphAddKernelNode", Needs::kContext, [&](simulator::Device& device) {
    require_given(node);
    require_given(params);
    std::vector<std::uint64_t> before;
    for (std::size_t index = 0; index < n_dependencies; ++index) {
      before.push_back(as_number(dependencies[index]));
    }
    const auto added = device.graphs.add(*get(device, graph), to_call(device, *params), before);
    *node = as_handle<GraphNode>(added->handle);
  });
}

namespace {

std::vector<std::uint64_t> to_numbers(const GraphNode* nodes, std::size_t n_nodes) {
  std::vector<std::uint64_t> numbers;
  for (std::size_t index = 0; index < n_nodes; ++index) numbers.push_back(as_number(nodes[index]));
  return numbers;
}

}  // namespace

Result graph_add_memcpy_node(GraphNode* node, Graph graph, const GraphNode* dependencies,
                             std::size_t n_dependencies, const Memcpy3D* params, Context) {
  return call("cuGraphAddMemcpyNode", Needs::kContext, [&](simulator::Device& device) {
    require_given(node);
    require_given(params);
    const Copy copy = to_copy(*params);
    device.graphs.validate(copy);
    const auto before = to_numbers(dependencies, n_dependencies);
    *node = as_handle<GraphNode>(device.graphs.add(*get(device, graph), copy, before)->handle);
  });
}

Result graph_add_event_record_node(GraphNode* node, Graph graph, const GraphNode* dependencies,
                                   std::size_t n_dependencies, Event event) {
  return call("cuGraphAddEventRecordNode", Needs::kContext, [&](simulator::Device& device) {
    require_given(node);
    const std::uint64_t handle =
        device.events.get(as_number(event), Status::kInvalidHandle)->handle;
    const auto before = to_numbers(dependencies, n_dependencies);
    const auto added =
        device.graphs.add(*get(device, graph), simulator::EventRecord{handle}, before);
    *node = as_handle<GraphNode>(added->handle);
  });
}

namespace {

// By CUgraphEdgeData, CUgraphDependencyType and CU_GRAPH_KERNEL_NODE_PORT_* in cuda.h: no node has
// ports that edges lead to, what is reserved is 0, only kernels have ports that edges lead from,
// the programmatic type is for two kernels and needs one of these ports, and the programmatic port
// needs that type.
void require_valid(const EdgeData& data, const simulator::Node& from, const simulator::Node& to) {
  constexpr unsigned char kProgrammaticPort = 1, kLaunchOrderPort = 2, kProgrammaticType = 1;
  const auto is_kernel = [](const simulator::Node& node) {
    return std::holds_alternative<KernelCall>(node.work);
  };
  const bool is_reserved_clear = std::all_of(std::begin(data.reserved), std::end(data.reserved),
                                             [](unsigned char one) { return one == 0; });
  simulator::require(data.to_port == 0 && is_reserved_clear, Status::kInvalidValue);
  simulator::require(data.type <= kProgrammaticType && data.from_port <= kLaunchOrderPort,
                     Status::kInvalidValue);
  simulator::require(data.from_port == 0 || is_kernel(from), Status::kInvalidValue);
  if (data.type == kProgrammaticType) {
    simulator::require(is_kernel(from) && is_kernel(to) && data.from_port != 0,
                       Status::kInvalidValue);
  } else {
    simulator::require(data.from_port != kProgrammaticPort, Status::kInvalidValue);
  }
}

}  // namespace

Result graph_add_dependencies(Graph graph, const GraphNode* from, const GraphNode* to,
                              const EdgeData* data, std::size_t n_edges) {
  return call("cuGraphAddDependencies", Needs::kContext, [&](simulator::Device& device) {
    get(device, graph);
    for (std::size_t edge = 0; edge < n_edges; ++edge) {
      const auto node = get(device, to[edge]);
      simulator::require(node->graph == as_number(graph), Status::kInvalidValue);
      simulator::EdgeKind kind;
      const auto before = get(device, from[edge]);
      if (data != nullptr) {
        require_valid(data[edge], *before, *node);
        kind = {data[edge].from_port, data[edge].to_port, data[edge].type};
      }
      device.graphs.depend(*node, *before, kind);
    }
  });
}

// "Specifying an edge that does not exist in the graph, with data matching edgeData, results in an
// error"; no data means zeros (cuGraphRemoveDependencies of the driver's manual).
Result graph_remove_dependencies(Graph graph, const GraphNode* from, const GraphNode* to,
                                 const EdgeData* data, std::size_t n_edges) {
  return call("cuGraphRemoveDependencies", Needs::kContext, [&](simulator::Device& device) {
    get(device, graph);
    for (std::size_t edge = 0; edge < n_edges; ++edge) {
      const auto node = get(device, to[edge]);
      simulator::require(node->graph == as_number(graph), Status::kInvalidValue);
      simulator::EdgeKind kind;
      if (data != nullptr) kind = {data[edge].from_port, data[edge].to_port, data[edge].type};
      device.graphs.undepend(*node, *get(device, from[edge]), kind);
    }
  });
}

Result graph_node_get_type(GraphNode node, GraphNodeType* type) {
  constexpr GraphNodeType kTypes[] = {kNodeKernel, kNodeMemcpy, kNodeMemset,
                                      kNodeHost,   kNodeGraph,  kNodeEventRecord};
  return call("cuGraphNodeGetType", Needs::kDriver, [&](simulator::Device& device) {
    require_given(type);
    *type = kTypes[get(device, node)->work.index()];
  });
}

Result graph_kernel_get_params(GraphNode node, KernelNodeParams* params) {
  return call("cuGraphKernelNodeGetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    work_of<KernelCall>(device, node);
    *params = to_params(*get(device, node));
  });
}

Result graph_kernel_set_params(GraphNode node, const KernelNodeParams* params) {
  return call("cuGraphKernelNodeSetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    auto changed = to_call(device, *params);
    changed.attributes = work_of<KernelCall>(device, node).attributes;
    device.graphs.set(*get(device, node), std::move(changed));
  });
}

namespace {

// Those of kernels' nodes (CU_KERNEL_NODE_ATTRIBUTE_* in cuda.h): access policy window,
// cooperative, cluster's dimensions, its scheduling, priority, domains of memory synchronisation
// (map, one), preferred cluster, update on the device, preferred shared memory, scheduling by
// NVLink.
bool is_node_attribute(int attribute) {
  constexpr int kKnown[] = {1, 2, 4, 5, 8, 9, 10, 11, 13, 14, 16};
  constexpr int kPreferredCluster = 11, kLinkCentric = 16;
  if (attribute == kPreferredCluster && driver().version < 12080) return false;
  if (attribute == kLinkCentric && driver().version < 13000) return false;
  return std::find(std::begin(kKnown), std::end(kKnown), attribute) != std::end(kKnown);
}

}  // namespace

Result graph_kernel_get_attribute(GraphNode node, int attribute, unsigned char* value) {
  return call("cuGraphKernelNodeGetAttribute", Needs::kDriver, [&](simulator::Device& device) {
    require_given(value);
    const auto& attributes = work_of<KernelCall>(device, node).attributes;
    simulator::require(is_node_attribute(attribute), Status::kInvalidValue);
    const auto found = attributes.find(attribute);
    const auto read = found == attributes.end() ? simulator::AttributeValue{} : found->second;
    std::memcpy(value, read.data(), read.size());
  });
}

Result graph_memcpy_get_params(GraphNode node, Memcpy3D* params) {
  return call("cuGraphMemcpyNodeGetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    *params = to_params(work_of<Copy>(device, node));
  });
}

Result graph_memcpy_set_params(GraphNode node, const Memcpy3D* params) {
  return call("cuGraphMemcpyNodeSetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    device.graphs.set(*get(device, node), to_copy(*params));
  });
}

Result graph_memset_get_params(GraphNode node, MemsetNodeParams* params) {
  return call("cuGraphMemsetNodeGetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    *params = to_params(work_of<Fill>(device, node));
  });
}

Result graph_memset_set_params(GraphNode node, const MemsetNodeParams* params) {
  return call("cuGraphMemsetNodeSetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    device.graphs.set(*get(device, node), to_fill(*params));
  });
}

Result graph_host_get_params(GraphNode node, HostNodeParams* params) {
  return call("cuGraphHostNodeGetParams", Needs::kDriver, [&](simulator::Device& device) {
    require_given(params);
    const auto& host = work_of<HostCall>(device, node);
    *params = {host.function, host.user};
  });
}

namespace {

constexpr unsigned long long kAutoFree = 1, kDeviceLaunch = 4;

// A kernel that work on the device may change (CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE).
bool is_device_updatable(const simulator::Node& node) {
  constexpr int kDeviceUpdatable = 13;
  const auto* const kernel = std::get_if<KernelCall>(&node.work);
  if (kernel == nullptr) return false;
  const auto found = kernel->attributes.find(kDeviceUpdatable);
  if (found == kernel->attributes.end()) return false;
  return std::any_of(found->second.begin(), found->second.begin() + sizeof(int),
                     [](unsigned char one) { return one != 0; });
}

// Flags that cuGraphInstantiateWithFlags of the driver's manual allows: three flags, of which two
// exclude each other (upload is only for cuGraphInstantiateWithParams).
void require_known(unsigned long long flags) {
  simulator::require((flags & ~(kAutoFree | kDeviceLaunch | kUseNodePriority)) == 0 &&
                         (flags & (kAutoFree | kDeviceLaunch)) != (kAutoFree | kDeviceLaunch),
                     Status::kInvalidValue);
}

// By the same page and "Device Graph Launch" of the programming guide: a graph launched from the
// device holds only kernels, copies, memsets and child graphs, and a graph with kernels that the
// device may change has one executable at a time. The driver's codes for these refusals are not
// documented there.
bool is_supported(simulator::Device& device, const simulator::Graph& graph,
                  unsigned long long flags) {
  const bool for_device = (flags & kDeviceLaunch) != 0;
  for (const auto& node : graph.nodes) {
    const bool is_of_host = std::holds_alternative<HostCall>(node->work) ||
                            std::holds_alternative<simulator::EventRecord>(node->work);
    if (for_device && is_of_host) return false;
    if (is_device_updatable(*node) && device.graphs.is_instantiated(graph)) return false;
  }
  return true;
}

}  // namespace

Result graph_instantiate(GraphExec* exec, Graph graph, unsigned long long flags) {
  bool supported = true;
  const Result result =
      call("cuGraphInstantiateWithFlags", Needs::kContext, [&](simulator::Device& device) {
        require_given(exec);
        require_known(flags);
        const auto found = get(device, graph);
        supported = is_supported(device, *found, flags);
        if (!supported) return;
        for (const auto& node : found->nodes) {
          const auto* const kernel = std::get_if<KernelCall>(&node->work);
          if (kernel != nullptr) device.load(*device.kernel(kernel->kernel->handle));
        }
        *exec = as_handle<GraphExec>(device.graphs.instantiate(*found)->handle);
      });
  return supported ? result : kNotSupported;
}

Result graph_exec_destroy(GraphExec exec) {
  return call("cuGraphExecDestroy", Needs::kDriver, [&](simulator::Device& device) {
    device.graphs.destroy_executable(as_number(exec));
  });
}

Result graph_upload(GraphExec exec, Stream stream) {
  return call("cuGraphUpload", Needs::kContext, [&](simulator::Device& device) {
    device.graphs.executable(as_number(exec));
    device.captures.require_not_capturing(*device.scheduler.get(as_number(stream)));
  });
}

Result graph_launch(GraphExec exec, Stream stream) {
  return call("cuGraphLaunch", Needs::kContext, [&](simulator::Device& device) {
    const auto executable = device.graphs.executable(as_number(exec));
    device.launch(*device.scheduler.get(as_number(stream)), *executable);
  });
}

namespace {

// Sets the parameters converted by `convert`.
template <class Params, class Convert>
Result set_in_executable(const char* symbol, GraphExec exec, GraphNode node, const Params* params,
                         const Convert& convert) {
  return call(symbol, Needs::kContext, [&](simulator::Device& device) {
    require_given(params);
    const auto executable = device.graphs.executable(as_number(exec));
    device.graphs.set(*executable, *get(device, node), convert(device, *params));
  });
}

}  // namespace

Result graph_exec_kernel_set_params(GraphExec exec, GraphNode node,
                                    const KernelNodeParams* params) {
  return set_in_executable("cuGraphExecKernelNodeSetParams", exec, node, params, to_call);
}

Result graph_exec_memcpy_set_params(GraphExec exec, GraphNode node, const Memcpy3D* params,
                                    Context) {
  return set_in_executable("cuGraphExecMemcpyNodeSetParams", exec, node, params,
                           [](auto&, const Memcpy3D& given) { return to_copy(given); });
}

Result graph_exec_memset_set_params(GraphExec exec, GraphNode node, const MemsetNodeParams* params,
                                    Context) {
  return set_in_executable("cuGraphExecMemsetNodeSetParams", exec, node, params,
                           [](auto&, const MemsetNodeParams& given) { return to_fill(given); });
}

}  // namespace simulated_cuda
