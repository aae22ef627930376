#include "ascend/model_tasks.hpp"

#include <algorithm>
#include <string>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

void check_told(const Runtime& runtime, Error error, const char* what) {
  if (error == kRtFeatureNotSupport) {
    throw BackendUnavailable(
        "the parameters of a model's tasks cannot be read here: that needs an Atlas A2, A3 or 950, "
        "and firmware and a driver with software SQ (" +
        runtime.describe(error) + ")");
  }
  runtime.check(error, what);
}

// Queries the number first, then that many handles.
template <typename Handle, typename Ask>
std::vector<Handle> handles(const Runtime& runtime, const Ask& ask, const char* what) {
  std::uint32_t count = 0;
  check_told(runtime, ask(nullptr, &count), what);
  std::vector<Handle> found(count);
  if (count != 0) check_told(runtime, ask(found.data(), &count), what);
  found.resize(count);
  return found;
}

std::vector<Stream> streams_of(const Runtime& runtime, Model model) {
  runtime.require(Capability::kTaskParameters, "listing the tasks of a captured model");
  return handles<Stream>(
      runtime,
      [&](Stream* streams, std::uint32_t* count) {
        return runtime.model_get_streams(model, streams, count);
      },
      "asking for the streams of a model");
}

std::vector<ModelTask> tasks_of(const Runtime& runtime, Stream stream) {
  return handles<ModelTask>(
      runtime,
      [&](ModelTask* tasks, std::uint32_t* count) {
        return runtime.stream_get_tasks(stream, tasks, count);
      },
      "asking for the tasks of a model");
}

CapturedTask read_task(const Runtime& runtime, ModelTask task) {
  CapturedTask read;
  check_told(runtime, runtime.task_get_type(task, &read.type), "asking for the type of a task");
  if (read.type != kTaskKernel) return read;
  ModelTaskParameters parameters = {};
  check_told(runtime, runtime.task_get_parameters(task, &parameters),
             "asking for the parameters of a task");
  const KernelTaskParameters& kernel = parameters.kernel;
  read.function = kernel.function;
  read.n_blocks = kernel.n_blocks;
  read.address = reinterpret_cast<std::uint64_t>(kernel.arguments);
  read.arguments.resize(kernel.arguments_bytes);
  if (read.arguments.empty()) return read;
  runtime.check(runtime.memcpy(read.arguments.data(), read.arguments.size(), kernel.arguments,
                               read.arguments.size(), kDeviceToHost),
                "reading the arguments of a kernel");
  return read;
}

}  // namespace

ModelStreams streams_held(const Runtime& runtime, Model model, int n_known) noexcept {
  if (!runtime.has(Capability::kTaskParameters)) return {n_known, false};
  std::uint32_t count = 0;
  if (runtime.model_get_streams(model, nullptr, &count) != kSuccess) {
    runtime.get_recent_error_message();  // clears it
    return {n_known, false};
  }
  return {std::max(n_known, static_cast<int>(count)), true};
}

std::vector<std::uint32_t> count_tasks(const Runtime& runtime, Model model) {
  std::vector<std::uint32_t> counts;
  for (const Stream stream : streams_of(runtime, model)) {
    std::uint32_t count = 0;
    check_told(runtime, runtime.stream_get_tasks(stream, nullptr, &count),
               "counting the tasks of a model");
    counts.push_back(count);
  }
  return counts;
}

std::vector<ModelTask> task_handles(const Runtime& runtime, Model model) {
  std::vector<ModelTask> found;
  for (const Stream stream : streams_of(runtime, model)) {
    const std::vector<ModelTask> tasks = tasks_of(runtime, stream);
    found.insert(found.end(), tasks.begin(), tasks.end());
  }
  return found;
}

std::vector<CapturedTask> read_tasks(const Runtime& runtime, Model model) {
  const RelaxedCapture relaxed(runtime);
  std::vector<CapturedTask> read;
  const std::vector<Stream> streams = streams_of(runtime, model);
  for (std::uint32_t index = 0; index < streams.size(); ++index) {
    for (const ModelTask task : tasks_of(runtime, streams[index])) {
      read.push_back(read_task(runtime, task));
      read.back().stream = index;
    }
  }
  return read;
}

}  // namespace offload::acl
