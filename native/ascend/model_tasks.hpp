// The tasks of a captured model, as reported by the runtime: kernels' arguments and their
// addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "ascend/argument_layout.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// One task of a model. A kernel's arguments lie in a block of the runtime on the device, at a fixed
// address for the life of the model; other kinds of task have no details.
struct CapturedTask {
  std::uint32_t stream = 0;  // of the model's streams, in the runtime's order
  ModelTaskType type = kTaskDefault;
  Function function = nullptr;  // of a kernel, as all fields below
  std::uint32_t n_blocks = 0;
  std::uint64_t address = 0;  // of its argument block
  ArgumentBlock arguments;    // its present content
};

// Streams of a model. The runtime does not report those that it adds where a stream is full.
struct ModelStreams {
  int count = 0;
  bool is_told = false;  // by the runtime (aclmdlRIGetStreams); else a lower bound
};

// The streams of a finished model, of which `n_known` are known in any case. Errors: none. Needs
// the device's context current.
ModelStreams streams_held(const Runtime& runtime, Model model, int n_known) noexcept;

// The number of tasks on each stream of a model, which may still be being captured. Throws
// BackendUnavailable where the runtime reports no tasks, ExecutionError where it fails. Needs the
// device's context current, as does read_tasks.
std::vector<std::uint32_t> count_tasks(const Runtime& runtime, Model model);

// The handles of all tasks of a model, in the order of read_tasks. Errors: as count_tasks.
std::vector<ModelTask> task_handles(const Runtime& runtime, Model model);

// All tasks of a captured model, stream by stream and in the order of capture. Errors: as
// count_tasks; BackendUnavailable also where the firmware cannot report parameters (no software
// SQ).
std::vector<CapturedTask> read_tasks(const Runtime& runtime, Model model);

}  // namespace offload::acl
