// The tasks of a captured model, as the runtime tells them: what kernels are given, and where.
#pragma once

#include <cstdint>
#include <vector>

#include "ascend/argument_layout.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// One task of a model. A kernel's arguments lie in a block of the runtime's on the device, which
// lives and stays as long as the model; of other kinds of task nothing is told.
struct CapturedTask {
  std::uint32_t stream = 0;  // of the model's streams, in the runtime's order
  ModelTaskType type = kTaskDefault;
  Function function = nullptr;  // of a kernel, as all below
  std::uint32_t n_blocks = 0;
  std::uint64_t address = 0;  // of its argument block
  ArgumentBlock arguments;    // what that holds now
};

// Streams of a model. What the runtime adds where a stream is full it does not tell of.
struct ModelStreams {
  int count = 0;
  bool is_told = false;  // by the runtime (aclmdlRIGetStreams); else that many at least
};

// The streams of a model that has been made, of which `n_known` are known anyhow. Errors: none.
// Needs the device's context current.
ModelStreams streams_held(const Runtime& runtime, Model model, int n_known) noexcept;

// How many tasks there are on each stream of a model, which may still be being captured. Throws
// BackendUnavailable where the runtime tells no tasks, ExecutionError where it fails. Needs the
// device's context current, as read_tasks does.
std::vector<std::uint32_t> count_tasks(const Runtime& runtime, Model model);

// The handles of all tasks of a model, in the order of read_tasks. Errors: as count_tasks.
std::vector<ModelTask> task_handles(const Runtime& runtime, Model model);

// All tasks of a model that was captured, stream by stream and in the order of capture. Errors: as
// count_tasks; BackendUnavailable also where the firmware cannot tell parameters (no software SQ).
std::vector<CapturedTask> read_tasks(const Runtime& runtime, Model model);

}  // namespace offload::acl
