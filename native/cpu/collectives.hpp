// Collectives of torch's process groups: started by one launch, awaited by another.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

namespace offload {

// A collective of a program, which each execution starts once and then waits for.
//
// It makes the same calls of the process group as the operator of the namespace _c10d_functional,
// so that an executing rank can meet a rank that calls the operator; but it holds the Work itself,
// which torch would find by the storage of the result
// (torch/csrc/distributed/c10d/ProcessGroup.cpp), and its results have given places. In a group of
// one rank nothing is sent: results are copies.
//
// Owner: the launches that start it and wait for it. Thread: any, one at a time, without the GIL.
// Errors: std::runtime_error with the operator, the group, the time since the start, and the
// process group's own words (a peer has ended or is late); and ExecutionError where the group was
// destroyed, or belongs to another process; a running collective is then abandoned by `drain`.
class Collective {
 public:
  virtual ~Collective() = default;

  // Begins. The tensors that it was made with belong to it until `wait` has returned.
  virtual void start() = 0;

  // Returns once it has ended; at once if it has ended, or was not started.
  virtual void wait() = 0;

  // As wait, ignoring errors: at most for the group's own timeout. Memory must not be freed while
  // peers may write it.
  virtual void drain() noexcept = 0;
};

// The collective of an operator, by its name (all_reduce, all_reduce_, ...).
//
// `arguments`: in the order of its schema, its group by name. `outputs`: the places of results that
// the operator would allocate, in order. Throws std::invalid_argument for another operator, and
// BindingError where no group has this name.
std::shared_ptr<Collective> make_collective(const std::string& name,
                                            const std::vector<c10::IValue>& arguments,
                                            std::vector<at::Tensor> outputs);

// The name of a boxed c10d::ReduceOp in functional collectives (sum, max, ...). Throws
// std::invalid_argument for one without a name there.
std::string reduce_op_name(const c10::IValue& boxed);

}  // namespace offload
