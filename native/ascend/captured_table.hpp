// One table of our own from which the kernels of a captured model read their arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// A kernel of a captured model; its arguments are the block of the same index.
struct MovedKernel {
  std::size_t task = 0;       // its number among the model's, in the order of read_tasks
  std::uint64_t address = 0;  // of its block when that was read
};

// aclmdlRITaskSetParams takes a kernel's arguments from the host (isHostArgs 1), which the runtime
// copies at once, or from device memory (0), of which it keeps only the address. The second form is
// used here, for each kernel, and one aclmdlRIUpdate makes it effective: from then on every
// execution reads the table, and no task is changed again. Only copies change the table's content.
//
// A task that is set loses the runtime's block, so words that pointed into that block are set to
// point into the table's; place holders are not filled in as by a launch. It gets only the
// attributes that are given: those that can be queried are given again. The shapes that a profiler
// shows are passed on as they were read.
//
// Sources: hicann/runtime 9.1.0 and master, src/runtime/core/src/kernel/kernel_utils.cc
// (UpdateKernelParams, GetKernelAttribute), api_impl.cc (TaskSetParams, ModelUpdate). They state no
// alignment of arguments.
//
// Owner: one captured model, from its update until after its destruction: tasks read the table.
// Thread: callers serialise, with the device's context current. Errors: the constructor does not
// change the model; it throws BackendUnavailable where the runtime changes no tasks, or a task may
// not be set (not the kernel that was read, or of a task group), OutOfMemory, ExecutionError where
// the runtime fails, and std::invalid_argument as HostTable.
class CapturedTable {
 public:
  CapturedTable(const Runtime& runtime, Model model, const TableParts& parts,
                const std::vector<MovedKernel>& kernels);
  CapturedTable(const CapturedTable&) = delete;
  CapturedTable& operator=(const CapturedTable&) = delete;

  // Sets the table as the kernels' arguments, once. The model is idle. Throws ExecutionError where
  // the runtime refuses, or would not keep the table's address; the model may be unusable then.
  void install();

  HostTable& table() { return table_; }

  std::size_t n_kernels() const { return tasks_.size(); }
  std::uint64_t n_set() const { return n_set_; }          // tasks, so far
  std::uint64_t n_updates() const { return n_updates_; }  // of the model, so far

 private:
  struct Task {
    ModelTask handle = nullptr;
    ModelTaskParameters parameters = {};
    std::vector<LaunchAttribute> attributes;
  };

  Task read(ModelTask handle, const MovedKernel& kernel, std::size_t n_bytes) const;
  std::optional<LaunchAttribute> attribute(ModelTask handle, LaunchAttributeId id) const;
  void check_kept(const Task& task) const;

  const Runtime& runtime_;
  Model model_;
  HostTable table_;
  std::vector<Task> tasks_;
  std::uint64_t n_set_ = 0;
  std::uint64_t n_updates_ = 0;
};

}  // namespace offload::acl
