// Collectives of torch's process groups: started by one launch, waited for by another.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

namespace offload {

// A collective of a program, which each execution starts once and waits for behind that.
//
// It does what the operator of the namespace _c10d_functional does, with the same calls of the
// process group, so that a rank that executes meets one that calls the operator; but it holds the
// Work itself, where torch looks for it by the storage of the result
// (torch/csrc/distributed/c10d/ProcessGroup.cpp), and its results lie where they are wanted. In a
// group of one rank nothing is sent: results are copies.
//
// Owner: the launches that start it and wait for it. Thread: any, one at a time, without the GIL.
// Errors: std::exception of the process group's (a peer that is gone or late), and ExecutionError
// where the group was destroyed, or is another process's; what is under way then is given up by
// `drain`.
class Collective {
 public:
  virtual ~Collective() = default;

  // Begins. The tensors that it was made with belong to it until `wait` has returned.
  virtual void start() = 0;

  // Returns once it has ended; at once where it has, or was not started.
  virtual void wait() = 0;

  // As wait, whatever comes of it: at most as long as the group's own timeout. Memory must not be
  // given back while peers may write it.
  virtual void drain() noexcept = 0;
};

// The collective of an operator, by its name (all_reduce, all_reduce_, ...).
//
// `arguments`: in the order of its schema, its group by name. `outputs`: where the results go that
// the operator would allocate, in order. Throws std::invalid_argument for another operator, and
// BindingError where there is no group of this name.
std::shared_ptr<Collective> make_collective(const std::string& name,
                                            const std::vector<c10::IValue>& arguments,
                                            std::vector<at::Tensor> outputs);

// What a boxed c10d::ReduceOp is called in functional collectives (sum, max, ...). Throws
// std::invalid_argument for one that has no name there.
std::string reduce_op_name(const c10::IValue& boxed);

}  // namespace offload
