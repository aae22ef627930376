#include "ascend/captured_table.hpp"

#include <stdexcept>
#include <string>

#include "ascend/model_tasks.hpp"
#include "offload/errors.hpp"

namespace offload::acl {
namespace {

// The attributes that the runtime reports of a task and accepts. It does not report the engine, the
// offset of blocks, whether prefetches are blocked and whether profiling is on (107000).
constexpr LaunchAttributeId kToldAttributes[] = {kLaunchSchedulingMode, kLaunchLocalMemoryBytes,
                                                 kLaunchDataDump, kLaunchTimeoutMicroseconds};

}  // namespace

CapturedTable::CapturedTable(const Runtime& runtime, Model model, const TableParts& parts,
                             const std::vector<MovedKernel>& kernels)
    : runtime_(runtime), model_(model), table_(runtime, parts) {
  runtime.require(Capability::kTaskUpdate, "one argument table for a captured model");
  if (kernels.size() != parts.blocks.size()) {
    throw std::invalid_argument("each kernel of a captured model needs one block of the table");
  }
  const std::vector<ModelTask> handles = task_handles(runtime, model);
  for (std::size_t index = 0; index < kernels.size(); ++index) {
    const MovedKernel& kernel = kernels[index];
    if (kernel.task >= handles.size()) {
      throw BackendUnavailable("the model has no task " + std::to_string(kernel.task) +
                               " any more");
    }
    tasks_.push_back(read(handles[kernel.task], kernel, parts.blocks[index].size()));
  }
}

CapturedTable::Task CapturedTable::read(ModelTask handle, const MovedKernel& kernel,
                                        std::size_t n_bytes) const {
  const std::string name = "task " + std::to_string(kernel.task) + " of the captured model";
  Task task;
  task.handle = handle;
  runtime_.check(runtime_.task_get_parameters(handle, &task.parameters),
                 "asking for the parameters of " + name);
  const KernelTaskParameters& now = task.parameters.kernel;
  const bool is_as_read = task.parameters.type == kTaskKernel &&
                          reinterpret_cast<std::uint64_t>(now.arguments) == kernel.address &&
                          now.arguments_bytes == n_bytes && n_bytes != 0;
  if (!is_as_read) throw BackendUnavailable(name + " is not the kernel that was read");
  if (task.parameters.task_group != nullptr) {
    throw BackendUnavailable(name + " is in a task group, which is updated as a whole");
  }
  for (const LaunchAttributeId id : kToldAttributes) {
    if (const auto found = attribute(handle, id)) task.attributes.push_back(*found);
  }
  return task;
}

// None where the chip has no such attribute.
std::optional<LaunchAttribute> CapturedTable::attribute(ModelTask handle,
                                                        LaunchAttributeId id) const {
  LaunchAttribute found = {id, {}};
  const Error error = runtime_.kernel_task_get_attribute(handle, id, &found.value);
  if (error == kRtFeatureNotSupport) {
    runtime_.get_recent_error_message();  // clears it
    return std::nullopt;
  }
  runtime_.check(error, "asking for an attribute of a captured kernel");
  return found;
}

void CapturedTable::install() {
  if (n_set_ != 0) throw std::logic_error("a captured model gets its argument table once");
  table_.upload();
  for (std::size_t index = 0; index < tasks_.size(); ++index) {
    Task& task = tasks_[index];
    LaunchConfiguration configuration = {task.attributes.data(), task.attributes.size()};
    KernelTaskParameters& kernel = task.parameters.kernel;
    kernel.arguments = const_cast<void*>(table_.block(index));
    kernel.is_host_arguments = 0;
    kernel.configuration = &configuration;
    ++n_set_;
    const Error error = runtime_.task_set_parameters(task.handle, &task.parameters);
    kernel.configuration = nullptr;
    runtime_.check(error, "giving a captured kernel its arguments in a table");
    check_kept(task);
  }
  ++n_updates_;
  runtime_.check(runtime_.model_update(model_), "updating a captured model");
}

// On some chips the runtime accepts the address only if it can store it in a handle of its own.
void CapturedTable::check_kept(const Task& task) const {
  ModelTaskParameters now = {};
  runtime_.check(runtime_.task_get_parameters(task.handle, &now),
                 "asking where a captured kernel has its arguments");
  if (now.kernel.arguments == task.parameters.kernel.arguments) return;
  throw ExecutionError("the runtime did not keep the address of the argument table");
}

}  // namespace offload::acl
