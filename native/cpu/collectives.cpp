#include "cpu/collectives.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_map>
#include <utility>

#include "offload/errors.hpp"

// torch 2.13 renames some collectives; torch 2.11 does not know the new names.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace offload {
namespace {

using TensorVector = std::vector<at::Tensor>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// Gloo reports to a rank that arrives too late that its peer has crashed.
constexpr const char* kAfterFailure =
    "; a group ends when a rank ends, or comes to another one later than the timeout: make the "
    "groups again (destroy_process_group, init_process_group), and load the programs again";

// As named by functional collectives (torch/csrc/distributed/c10d/Functional.cpp).
constexpr std::array<std::pair<const char*, c10d::ReduceOp::RedOpType>, 8> kReduceOps{{
    {"sum", c10d::ReduceOp::SUM},
    {"avg", c10d::ReduceOp::AVG},
    {"product", c10d::ReduceOp::PRODUCT},
    {"min", c10d::ReduceOp::MIN},
    {"max", c10d::ReduceOp::MAX},
    {"band", c10d::ReduceOp::BAND},
    {"bor", c10d::ReduceOp::BOR},
    {"bxor", c10d::ReduceOp::BXOR},
}};

c10d::ReduceOp find_reduce_op(const std::string& name) {
  for (const auto& [known, type] : kReduceOps) {
    if (name == known) return c10d::ReduceOp(type);
  }
  throw std::invalid_argument("there is no reduction " + name);
}

// Gloo has no complex numbers; functional collectives send pairs of real ones.
at::Tensor real_view(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

TensorVector real_views(const TensorVector& tensors) {
  TensorVector views;
  for (const at::Tensor& one : tensors) views.push_back(real_view(one));
  return views;
}

TensorVector tensors_of(const c10::IValue& value) {
  return value.isTensor() ? TensorVector{value.toTensor()} : value.toTensorVector();
}

Group find_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    throw BindingError("there is no process group " + name +
                       " here: make it before the program is loaded");
  }
}

// The tensors that are sent and received, and the calls that do it.
class GroupCollective final : public Collective {
 public:
  using Begin = std::function<WorkPointer(c10d::ProcessGroup&, GroupCollective&)>;

  GroupCollective(std::string what, std::string group, TensorVector inputs, TensorVector outputs,
                  bool in_place, bool copies, Begin begin)
      : what_(std::move(what)),
        name_(std::move(group)),
        group_(find_group(name_)),
        inputs_(real_views(inputs)),
        outputs_(real_views(outputs)),
        in_place_(in_place),
        copies_(copies),
        begin_(std::move(begin)) {}
  ~GroupCollective() override { drain(); }
  GroupCollective(const GroupCollective&) = delete;
  GroupCollective& operator=(const GroupCollective&) = delete;

  void start() override {
    const Group group = present_group();
    const bool alone = group->getSize() == 1;
    if (!in_place_ && (copies_ || alone)) {
      for (std::size_t at = 0; at < outputs_.size(); ++at) outputs_[at].copy_(inputs_[at]);
    }
    if (alone) return;
    refuse_forked();
    begun_ = std::chrono::steady_clock::now();
    work_ = begin_(*group, *this);
  }

  void wait() override {
    if (!work_) return;
    const WorkPointer work = std::move(work_);
    const std::function<void()> end = std::exchange(end_, nullptr);
    try {
      if (!work->wait()) throw std::runtime_error("the process group gave up");
    } catch (const std::exception& error) {
      std::throw_with_nested(std::runtime_error(told_of_end() + error.what() + kAfterFailure));
    }
    if (end) end();
  }

  void drain() noexcept override {
    try {
      wait();
    } catch (const std::exception&) {  // reported by the first failure
    }
  }

  // Sets what is to be done when the work of the running collective has ended.
  void set_end(std::function<void()> end) { end_ = std::move(end); }

  TensorVector& inputs() { return inputs_; }
  TensorVector& outputs() { return outputs_; }
  const TensorVector& outputs() const { return outputs_; }

 private:
  // The collective, its group, and how long it has run, before the group's own words. Gloo does not
  // say which ranks have come; the peer of a message is known.
  std::string told_of_end() const {
    const auto ran = std::chrono::steady_clock::now() - begun_;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(ran).count();
    const Group group = group_.lock();
    const std::string here = group ? ", where this is number " + std::to_string(group->getRank()) +
                                         " of " + std::to_string(group->getSize()) + " ranks,"
                                   : "";
    return what_ + " in process group '" + name_ + "'" + here + " failed after " +
           std::to_string(ms) + " ms: ";
  }

  // A destroyed group may still be referenced, and its name may belong to a new group.
  Group present_group() const {
    Group group = group_.lock();
    try {
      if (group && c10d::resolve_process_group(name_) == group) return group;
    } catch (const std::exception&) {  // torch knows no group of this name
    }
    throw ExecutionError("the process group " + name_ +
                         " was destroyed: load the program again with the current groups");
  }

  // A forked process has the group, but not the threads that work for it.
  void refuse_forked() const {
    if (getpid() == process_) return;
    throw ExecutionError("the process group " + name_ +
                         " belongs to the process that this one was forked from, where its "
                         "threads run: make groups and load the program in the new process");
  }

  std::string what_;  // the operator, and the peer of a message
  std::string name_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  TensorVector inputs_;
  TensorVector outputs_;
  bool in_place_;
  bool copies_;  // inputs are first copied to the outputs, which are then sent
  Begin begin_;
  pid_t process_ = getpid();  // the process of the group's threads
  WorkPointer work_;          // null: not running
  std::chrono::steady_clock::time_point begun_;
  std::function<void()> end_;
};

using Begin = GroupCollective::Begin;
using Arguments = std::vector<c10::IValue>;

Begin begin_all_reduce(const std::string& reduction) {
  c10d::AllreduceOptions options;
  options.reduceOp = find_reduce_op(reduction);
  return [options](c10d::ProcessGroup& group, GroupCollective& one) {
    return group.allreduce(one.outputs(), options);
  };
}

// Whether a coalesced collective is performed on one flat tensor, by another call of the group.
//
// The worker threads of a gloo group, two by default, set the name of the last completed collective
// without a lock: `pgStatus_->lastCompletedWorkName` in ProcessGroupGloo::runLoop
// (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), a std::string. Names of more than 15
// characters, such as ALLREDUCE_COALESCED, have memory of their own in libstdc++, which concurrent
// assignments free twice. The calls made here have shorter names.
bool is_flattened(c10d::ProcessGroup& group, const GroupCollective& one) {
  if (group.getBackend(c10::DeviceType::CPU)->getBackendName() != "gloo") return false;
  const at::ScalarType dtype = one.outputs().front().scalar_type();
  return std::all_of(one.outputs().begin(), one.outputs().end(), [&](const at::Tensor& output) {
    return output.scalar_type() == dtype && output.is_contiguous();
  });
}

at::Tensor flattened(const TensorVector& tensors) {
  TensorVector flat;
  for (const at::Tensor& one : tensors) flat.push_back(one.reshape({-1}));
  return at::cat(flat);
}

// Copies consecutive elements of `flat` to tensors.
void spread(const at::Tensor& flat, const TensorVector& tensors) {
  std::int64_t begin = 0;
  for (const at::Tensor& one : tensors) {
    one.copy_(flat.narrow(0, begin, one.numel()).view(one.sizes()));
    begin += one.numel();
  }
}

// Copies what each rank sent, its tensors one after the other, to the rank's part of each output.
void spread_ranks(const at::Tensor& received, const TensorVector& outputs, std::int64_t n_ranks) {
  const TensorVector of_ranks = received.chunk(n_ranks);
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    TensorVector parts;
    for (const at::Tensor& output : outputs) {
      parts.push_back(output.view({-1}).chunk(n_ranks)[rank]);
    }
    spread(of_ranks[rank], parts);
  }
}

Begin begin_all_reduce_coalesced(const std::string& reduction) {
  c10d::AllreduceOptions options;
  options.reduceOp = find_reduce_op(reduction);
  c10d::AllreduceCoalescedOptions coalesced;
  coalesced.reduceOp = options.reduceOp;
  return [options, coalesced](c10d::ProcessGroup& group, GroupCollective& one) {
    if (!is_flattened(group, one)) return group.allreduce_coalesced(one.outputs(), coalesced);
    if (one.outputs().size() == 1) return group.allreduce(one.outputs(), options);
    TensorVector flat{flattened(one.outputs())};
    one.set_end([flat, &one] { spread(flat.front(), one.outputs()); });
    return group.allreduce(flat, options);
  };
}

Begin begin_broadcast(std::int64_t source) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return [options](c10d::ProcessGroup& group, GroupCollective& one) {
    return group.broadcast(one.outputs(), options);
  };
}

Begin begin_all_gather_coalesced() {
  return [](c10d::ProcessGroup& group, GroupCollective& one) {
    if (!is_flattened(group, one)) {
      return group.allgather_into_tensor_coalesced(one.outputs(), one.inputs());
    }
    at::Tensor sent = flattened(one.inputs());
    if (one.outputs().size() == 1) {
      at::Tensor received = one.outputs().front().view({-1});
      return group._allgather_base(received, sent);
    }
    const std::int64_t n_ranks = group.getSize();
    at::Tensor received = at::empty({n_ranks * sent.numel()}, sent.options());
    one.set_end([received, n_ranks, &one] { spread_ranks(received, one.outputs(), n_ranks); });
    return group._allgather_base(received, sent);
  };
}

Begin begin_all_gather_base() {
  return [](c10d::ProcessGroup& group, GroupCollective& one) {
    return group._allgather_base(one.outputs().front(), one.inputs().front());
  };
}

Begin begin_reduce_scatter(const std::string& reduction) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = find_reduce_op(reduction);
  return [options](c10d::ProcessGroup& group, GroupCollective& one) {
    return group.reduce_scatter_tensor_coalesced(one.outputs(), one.inputs(), options);
  };
}

Begin begin_all_to_all(std::vector<std::int64_t> output_sizes,
                       std::vector<std::int64_t> input_sizes) {
  return [received = std::move(output_sizes), sent = std::move(input_sizes)](
             c10d::ProcessGroup& group, GroupCollective& one) mutable {
    return group.alltoall_base(one.outputs().front(), one.inputs().front(), received, sent);
  };
}

Begin begin_send(std::int64_t peer, std::int64_t tag) {
  return [=](c10d::ProcessGroup& group, GroupCollective& one) {
    return group.send(one.inputs(), static_cast<int>(peer), static_cast<int>(tag));
  };
}

Begin begin_receive(std::int64_t peer, std::int64_t tag) {
  return [=](c10d::ProcessGroup& group, GroupCollective& one) {
    return group.recv(one.inputs(), static_cast<int>(peer), static_cast<int>(tag));
  };
}

// How an operator is executed: `in_place` on its arguments, which it writes; `copies` likewise, on
// copies of them.
struct Recipe {
  bool in_place = false;
  bool copies = false;
  std::function<Begin(const Arguments&)> begin;
};

using Recipes = std::unordered_map<std::string, Recipe>;

Recipes make_recipes() {
  const auto reduce = [](const Arguments& a) { return begin_all_reduce(a[1].toStringRef()); };
  const auto reduce_each = [](const Arguments& a) {
    return begin_all_reduce_coalesced(a[1].toStringRef());
  };
  const auto broadcast = [](const Arguments& a) { return begin_broadcast(a[1].toInt()); };
  const auto gather = [](const Arguments&) { return begin_all_gather_coalesced(); };
  const auto gather_into = [](const Arguments&) { return begin_all_gather_base(); };
  const auto scatter = [](const Arguments& a) { return begin_reduce_scatter(a[1].toStringRef()); };
  const auto to_all = [](const Arguments& a) {
    return begin_all_to_all(a[1].toIntVector(), a[2].toIntVector());
  };
  const auto send = [](const Arguments& a) { return begin_send(a[1].toInt(), a[2].toInt()); };
  const auto receive = [](const Arguments& a) { return begin_receive(a[1].toInt(), a[2].toInt()); };
  return {
      {"all_reduce", {false, true, reduce}},
      {"all_reduce_", {true, false, reduce}},
      {"all_reduce_coalesced", {false, true, reduce_each}},
      {"all_reduce_coalesced_", {true, false, reduce_each}},
      {"broadcast", {false, true, broadcast}},
      {"broadcast_", {true, false, broadcast}},
      {"all_gather_into_tensor", {false, false, gather}},
      {"all_gather_into_tensor_coalesced", {false, false, gather}},
      {"all_gather_into_tensor_out", {false, false, gather_into}},
      {"reduce_scatter_tensor", {false, false, scatter}},
      {"reduce_scatter_tensor_coalesced", {false, false, scatter}},
      {"reduce_scatter_tensor_out", {false, false, scatter}},
      {"all_to_all_single", {false, false, to_all}},
      {"isend", {true, false, send}},
      {"irecv", {true, false, receive}},
  };
}

// Peers write as many bytes as the shapes say, so sizes must match the operator's results.
void check(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

std::int64_t sum(const std::vector<std::int64_t>& numbers) {
  std::int64_t total = 0;
  for (const std::int64_t one : numbers) {
    check(one >= 0, "a size is negative");
    total += one;
  }
  return total;
}

// The shape of a result in a group of `n_ranks`.
std::vector<std::int64_t> result_shape(const std::string& name, const at::Tensor& input,
                                       const Arguments& arguments, std::int64_t n_ranks) {
  std::vector<std::int64_t> shape = input.sizes().vec();
  if (name.rfind("all_gather", 0) == 0) {
    if (shape.empty()) return {n_ranks};
    shape[0] *= n_ranks;
  } else if (name.rfind("reduce_scatter", 0) == 0) {
    check(!shape.empty() && shape[0] % n_ranks == 0,
          "the rows cannot be divided among " + std::to_string(n_ranks) + " ranks");
    shape[0] /= n_ranks;
  } else if (name == "all_to_all_single") {
    const std::vector<std::int64_t> received = arguments[1].toIntVector();
    const std::vector<std::int64_t> sent = arguments[2].toIntVector();
    const auto n = static_cast<std::size_t>(n_ranks);
    check(!shape.empty() && received.size() == n && sent.size() == n && sum(sent) == shape[0],
          "the sizes to send do not match the ranks and the rows");
    shape[0] = sum(received);
  }
  return shape;
}

void check_tensors(const std::string& name, const Arguments& arguments, const TensorVector& inputs,
                   const TensorVector& outputs, bool in_place, const c10d::ProcessGroup& group) {
  for (const at::Tensor& one : inputs) {
    check(one.is_contiguous() || name == "all_reduce" || name == "broadcast" ||
              name == "all_reduce_coalesced",
          "a tensor that is sent or received has gaps: give its .contiguous()");
  }
  if (in_place) return;
  check(outputs.size() == inputs.size(), "there are not as many results as tensors");
  for (std::size_t at = 0; at < outputs.size(); ++at) {
    const at::Tensor& input = inputs[at];
    const std::vector<std::int64_t> shape = result_shape(name, input, arguments, group.getSize());
    check(outputs[at].sizes() == c10::IntArrayRef(shape) && outputs[at].is_contiguous() &&
              outputs[at].scalar_type() == input.scalar_type(),
          "a result has another shape, layout or dtype than the operator makes in a group of " +
              std::to_string(group.getSize()));
  }
}

// The ranks that a collective names.
void check_peers(const std::string& name, const Arguments& arguments,
                 const c10d::ProcessGroup& group) {
  const auto is_rank = [&](std::int64_t one) { return one >= 0 && one < group.getSize(); };
  if (name == "isend" || name == "irecv") {
    check(is_rank(arguments[1].toInt()) && arguments[1].toInt() != group.getRank(),
          "there is no other rank " + std::to_string(arguments[1].toInt()));
  } else if (name == "broadcast" || name == "broadcast_") {
    check(is_rank(arguments[1].toInt()),
          "there is no rank " + std::to_string(arguments[1].toInt()));
  }
}

// The operator, and the peer of a message, for the user.
std::string described(const std::string& name, const Arguments& arguments) {
  if (name != "isend" && name != "irecv") return name;
  return name + (name == "isend" ? " to number " : " from number ") +
         std::to_string(arguments[1].toInt());
}

// The group of a collective is its last argument that is a name.
const std::string& group_name(const Arguments& arguments) {
  for (auto one = arguments.rbegin(); one != arguments.rend(); ++one) {
    if (one->isString()) return one->toStringRef();
  }
  throw std::invalid_argument("a collective has no group");
}

}  // namespace

std::shared_ptr<Collective> make_collective(const std::string& name, const Arguments& arguments,
                                            TensorVector outputs) {
  static const Recipes recipes = make_recipes();
  const auto found = recipes.find(name);
  if (found == recipes.end()) {
    throw std::invalid_argument("no collective " + name + " is executed without Python");
  }
  const Recipe& recipe = found->second;
  TensorVector inputs = tensors_of(arguments.at(0));
  if (recipe.in_place) {
    outputs = inputs;
  } else if (name.size() > 4 && name.rfind("_out") == name.size() - 4) {
    outputs = {arguments.back().toTensor()};
  }
  const Group group = find_group(group_name(arguments));
  check_tensors(name, arguments, inputs, outputs, recipe.in_place, *group);
  check_peers(name, arguments, *group);
  return std::make_shared<GroupCollective>(described(name, arguments), group_name(arguments),
                                           std::move(inputs), std::move(outputs), recipe.in_place,
                                           recipe.copies, recipe.begin(arguments));
}

std::string reduce_op_name(const c10::IValue& boxed) {
  const auto reduction = boxed.toCustomClass<c10d::ReduceOp>();
  for (const auto& [name, type] : kReduceOps) {
    if (reduction->op_ == type) return name;
  }
  throw std::invalid_argument("it has no name among functional collectives");
}

}  // namespace offload
