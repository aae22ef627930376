#include "graphs.hpp"

#include <algorithm>

namespace simulator {
namespace {

constexpr Status kInvalid = Status::kInvalidValue;

Operand destination_of(const Fill& fill) {
  Operand operand;
  operand.address = fill.destination;
  return operand;
}

bool is_line(const Copy& copy) { return copy.height == 1 && copy.depth == 1; }

// Properties that may not change in an executable, whatever the addresses.
void require_same_shape(const Work& before, const Work& after) {
  require(before.index() == after.index(), kInvalid);
  if (const auto* copy = std::get_if<Copy>(&after)) {
    require(is_line(*copy) && is_line(std::get<Copy>(before)) && copy->width_bytes != 0, kInvalid);
  } else if (const auto* fill = std::get_if<Fill>(&after)) {
    const auto& old = std::get<Fill>(before);
    require(fill->width != 0 && fill->height == 1 && old.height == 1, kInvalid);
  }
}

// An order in which every step follows its dependencies; `choose` returns the position of the next
// among ready steps, which are listed in the order in which they became ready.
template <class Choose>
std::vector<std::size_t> run_order(const std::vector<std::vector<std::size_t>>& dependencies,
                                   const Choose& choose) {
  std::vector<std::size_t> n_missing(dependencies.size());
  std::vector<std::vector<std::size_t>> dependents(dependencies.size());
  std::vector<std::size_t> ready, order;
  for (std::size_t index = 0; index < dependencies.size(); ++index) {
    n_missing[index] = dependencies[index].size();
    for (const std::size_t other : dependencies[index]) dependents[other].push_back(index);
    if (n_missing[index] == 0) ready.push_back(index);
  }
  while (!ready.empty()) {
    const auto chosen = ready.begin() + static_cast<std::ptrdiff_t>(choose(ready));
    const std::size_t index = *chosen;
    ready.erase(chosen);
    order.push_back(index);
    for (const std::size_t other : dependents[index]) {
      if (--n_missing[other] == 0) ready.push_back(other);
    }
  }
  return order;
}

}  // namespace

void Graphs::destroy(std::uint64_t handle) {
  for (const auto& node : graph(handle)->nodes) nodes_.remove(node->handle);
  graphs_.remove(handle);
}

std::shared_ptr<Graph> Graphs::graph(std::uint64_t handle) const {
  return graphs_.get(handle, kInvalid);
}

std::shared_ptr<Node> Graphs::node(std::uint64_t handle) const {
  return nodes_.get(handle, kInvalid);
}

std::shared_ptr<Executable> Graphs::executable(std::uint64_t handle) const {
  return executables_.get(handle, kInvalid);
}

std::vector<std::uint64_t> Graphs::held(const Operand& operand, std::size_t n_bytes) const {
  std::vector<std::uint64_t> ids;
  for (const Allocation* found : memory_.covering(operand.at(0, 0), n_bytes)) {
    ids.push_back(found->id);
  }
  return ids;
}

void Graphs::validate(const Work& work) const {
  const auto check = [this](const Operand& operand, std::size_t n_bytes) {
    if (operand.side != Side::kDevice || n_bytes == 0) return;
    require(!held(operand, n_bytes).empty(), kInvalid);
  };
  if (const auto* copy = std::get_if<Copy>(&work)) {
    check(copy->source, span_bytes(copy->source, *copy));
    check(copy->destination, span_bytes(copy->destination, *copy));
  } else if (const auto* fill = std::get_if<Fill>(&work)) {
    check(destination_of(*fill), span_bytes(*fill));
  }
}

std::shared_ptr<Node> Graphs::add(Graph& graph, Work work,
                                  std::vector<std::uint64_t> dependencies) {
  for (const std::uint64_t other : dependencies) {
    require(node(other)->graph == graph.handle, kInvalid);
  }
  auto added = std::make_shared<Node>();
  added->graph = graph.handle;
  added->work = std::move(work);
  added->dependencies = std::move(dependencies);
  graph.nodes.push_back(nodes_.add(added));
  return added;
}

void Graphs::depend(Node& node, const Node& before, EdgeKind kind) {
  require(node.graph == before.graph, kInvalid);
  auto& there = node.dependencies;
  require(std::find(there.begin(), there.end(), before.handle) == there.end(), kInvalid);
  there.push_back(before.handle);
  if (!kind.is_plain()) node.edge_kinds[before.handle] = kind;
}

void Graphs::undepend(Node& node, const Node& before, EdgeKind kind) {
  auto& there = node.dependencies;
  const auto found = std::find(there.begin(), there.end(), before.handle);
  require(found != there.end(), kInvalid);
  const auto kept = node.edge_kinds.find(before.handle);
  require((kept == node.edge_kinds.end() ? EdgeKind{} : kept->second) == kind, kInvalid);
  there.erase(found);
  node.edge_kinds.erase(before.handle);
}

void Graphs::set(Node& node, Work work) {
  require(node.work.index() == work.index(), kInvalid);
  validate(work);
  node.work = std::move(work);
}

std::shared_ptr<Graph> Graphs::clone(const Graph& original) {
  const auto result = create();
  std::map<std::uint64_t, std::uint64_t> twin_of;
  for (const auto& node : original.nodes) {
    const auto twin = add(*result, node->work, {});
    twin->original = node->handle;
    twin_of[node->handle] = twin->handle;
  }
  for (std::size_t index = 0; index < original.nodes.size(); ++index) {
    for (const std::uint64_t other : original.nodes[index]->dependencies) {
      result->nodes[index]->dependencies.push_back(twin_of.at(other));
    }
    for (const auto& [other, kind] : original.nodes[index]->edge_kinds) {
      result->nodes[index]->edge_kinds[twin_of.at(other)] = kind;
    }
  }
  return result;
}

std::shared_ptr<Node> Graphs::find_in_clone(const Node& original, const Graph& clone) const {
  for (const auto& node : clone.nodes) {
    if (node->original == original.handle) return node;
  }
  throw DeviceError(kInvalid);
}

std::shared_ptr<const Step> Graphs::make_step(Work work) const {
  auto step = std::make_shared<Step>();
  step->work = std::move(work);
  validate(step->work);
  if (const auto* copy = std::get_if<Copy>(&step->work)) {
    step->held_source = held(copy->source, span_bytes(copy->source, *copy));
    step->held_destination = held(copy->destination, span_bytes(copy->destination, *copy));
  } else if (const auto* fill = std::get_if<Fill>(&step->work)) {
    step->held_destination = held(destination_of(*fill), span_bytes(*fill));
  }
  return step;
}

// A kernel after a programmatic edge begins with its predecessor at the earliest: when everything
// that the predecessor waits for has ended. It waits for the rest itself, after its prologue.
void Graphs::add_prologues(const Graph& graph, Executable& executable) const {
  std::map<std::uint64_t, const Node*> by_handle;
  for (const auto& node : graph.nodes) by_handle[node->handle] = node.get();
  const auto begins_after = [&](const Node& node) {
    std::vector<std::size_t> found;
    std::vector<const Node*> pending{&node};
    while (!pending.empty()) {
      const Node* const one = pending.back();
      pending.pop_back();
      for (const std::uint64_t other : one->dependencies) {
        if (one->edge_kinds.count(other) != 0) {
          pending.push_back(by_handle.at(other));
        } else {
          found.push_back(executable.step_of.at(other));
        }
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  };
  for (const auto& node : graph.nodes) {
    const auto* const call = std::get_if<KernelCall>(&node->work);
    if (call == nullptr || call->kernel->prologue == nullptr || node->edge_kinds.empty()) continue;
    KernelCall prologue = *call;
    KernelCall rest = *call;
    prologue.is_prologue = rest.is_without_prologue = true;
    const std::size_t main = executable.step_of.at(node->handle);
    const std::size_t step = executable.run.steps.size();
    executable.prologue_of[node->handle] = step;
    executable.run.steps.push_back(make_step(std::move(prologue)));
    executable.run.steps[main] = make_step(std::move(rest));
    executable.dependencies.push_back(begins_after(*node));
    executable.dependencies[main].push_back(step);
  }
}

std::shared_ptr<Executable> Graphs::instantiate(const Graph& graph) {
  auto result = std::make_shared<Executable>();
  result->graph = graph.handle;
  std::vector<std::vector<std::size_t>> dependencies;
  for (const auto& node : graph.nodes) {
    result->step_of[node->handle] = result->run.steps.size();
    result->run.steps.push_back(make_step(node->work));
  }
  for (const auto& node : graph.nodes) {
    std::vector<std::size_t> steps;
    for (const std::uint64_t other : node->dependencies) steps.push_back(result->step_of.at(other));
    dependencies.push_back(std::move(steps));
  }
  result->dependencies = std::move(dependencies);
  add_prologues(graph, *result);
  result->run.order = order(*result);
  require(result->run.order.size() == result->run.steps.size(), kInvalid);  // else a cycle
  return executables_.add(result);
}

std::vector<std::size_t> Graphs::order(const Executable& executable) {
  using Ready = std::vector<std::size_t>;
  return run_order(executable.dependencies, [this](const Ready& ready) -> std::size_t {
    if (node_order_ == NodeOrder::kNewestFirst) return ready.size() - 1;
    if (node_order_ == NodeOrder::kRandom) return random_() % ready.size();
    return static_cast<std::size_t>(std::min_element(ready.begin(), ready.end()) - ready.begin());
  });
}

void Graphs::set_node_order(NodeOrder node_order, std::uint64_t seed) {
  node_order_ = node_order;
  random_.seed(seed);
}

bool Graphs::is_instantiated(const Graph& graph) const {
  const auto all = executables_.all();
  return std::any_of(all.begin(), all.end(),
                     [&graph](const auto& one) { return one->graph == graph.handle; });
}

void Graphs::destroy_executable(std::uint64_t handle) {
  executable(handle);
  executables_.remove(handle);
}

MemoryKind Graphs::kind_at(std::uint64_t address) const {
  const Allocation* const found = memory_.find(address);
  if (found == nullptr) return MemoryKind::kHost;
  if (found->kind == MemoryKind::kMapped && !strict_kinds_) return MemoryKind::kPlain;
  return found->kind;
}

void Graphs::require_same_kinds(const Step& before, const Step& after) const {
  const auto check = [this](const Operand& old, const Operand& now) {
    require(kind_at(old.address) == kind_at(now.address), kInvalid);
  };
  if (const auto* copy = std::get_if<Copy>(&after.work)) {
    const auto& old = std::get<Copy>(before.work);
    require(copy->source.side == old.source.side && copy->destination.side == old.destination.side,
            kInvalid);
    check(old.source, copy->source);
    check(old.destination, copy->destination);
  } else if (const auto* fill = std::get_if<Fill>(&after.work)) {
    check(destination_of(std::get<Fill>(before.work)), destination_of(*fill));
  }
}

void Graphs::set(Executable& executable, const Node& node, Work work) {
  const auto found = executable.step_of.find(node.handle);
  require(found != executable.step_of.end(), kInvalid);
  auto& step = executable.run.steps[found->second];
  require_same_shape(step->work, work);
  const auto prologue = executable.prologue_of.find(node.handle);
  if (auto* call = std::get_if<KernelCall>(&work)) {
    call->attributes = std::get<KernelCall>(step->work).attributes;
    if (prologue != executable.prologue_of.end()) {
      KernelCall before = *call;
      before.is_prologue = call->is_without_prologue = true;
      executable.run.steps[prologue->second] = make_step(std::move(before));
    }
  }
  auto changed = make_step(std::move(work));
  require_same_kinds(*step, *changed);
  step = std::move(changed);
}

bool Graphs::holds(const Step& step) const {
  if (const auto* copy = std::get_if<Copy>(&step.work)) {
    return held(copy->source, span_bytes(copy->source, *copy)) == step.held_source &&
           held(copy->destination, span_bytes(copy->destination, *copy)) == step.held_destination;
  }
  if (const auto* fill = std::get_if<Fill>(&step.work)) {
    return held(destination_of(*fill), span_bytes(*fill)) == step.held_destination;
  }
  return true;
}

std::size_t Graphs::executable_bytes() const {
  std::size_t n_nodes = 0;
  for (const auto& executable : executables_.all()) n_nodes += executable->step_of.size();
  return n_nodes * node_bytes_;
}

void Graphs::reset() {
  node_bytes_ = 0;
  graphs_.clear();
  nodes_.clear();
  executables_.clear();
  strict_kinds_ = true;
  node_order_ = NodeOrder::kNewestFirst;
}

}  // namespace simulator
