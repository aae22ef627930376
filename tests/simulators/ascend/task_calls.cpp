// Tasks of models: their enumeration, their content, and changes.
#include <algorithm>
#include <cstring>

#include "ascend/acl_tasks.hpp"
#include "models.hpp"

namespace simulated_ascend {
namespace {

// Writes all handles. Without space for them, writes only their number.
template <class Handle, class Handles>
void put_handles(const Handles& handles, Handle* results, std::uint32_t* count) {
  require_given(count, "the number");
  const std::uint32_t room = *count;
  *count = static_cast<std::uint32_t>(handles.size());
  if (results == nullptr) return;
  refuse_unless(room >= handles.size(), kRtInsufficientInputArray, "there is not enough room");
  std::transform(handles.begin(), handles.end(), results,
                 [](std::uint64_t number) { return as_handle<Handle>(number); });
}

std::shared_ptr<Task> task_of(Runtime& state, ModelTask handle) {
  const auto found = state.tasks.find(as_number(handle));
  refuse_unless(found != nullptr, kRtParamInvalid, "no task has this handle");
  return found;
}

// Requirements on the firmware and the model for reading and changing tasks.
void require_software_sq(const Runtime& state, const ModelState& model) {
  refuse_unless(state.settings.software_sq, kRtFeatureNotSupport,
                "the firmware has no software SQ");
  refuse_unless(model.is_captured, kRtFeatureNotSupport, "the model was not captured");
  refuse_unless(!model.is_sub_graph(), kRtFeatureNotSupport, "the task is a sub graph's");
}

// Runs `change`, after which the model waits for its update. A refusal leaves the model in a state
// in which it can be neither changed nor executed (TaskSetParams and ModelTaskDisable of
// hicann/runtime's api_impl.cc).
template <class Change>
void change_task(Runtime& state, const Task& task, const Change& change) {
  const auto model = task.model.lock();
  require_software_sq(state, *model);
  refuse_unless(
      model->phase == ModelState::Phase::kReady && !model->is_running() && !model->is_faulty,
      kRtModelUpdateFailed, "the model runs or is being captured, or a change of it was refused");
  model->is_updating = true;
  try {
    change();
  } catch (...) {
    model->is_updating = false;
    model->is_faulty = true;
    throw;
  }
}

// Errors: 107000 where the parameters are of another type of task, or of a type without settable
// parameters.
void require_type(const Task& task, ModelTaskType type) {
  const bool can_change = type == kTaskKernel || type == kTaskValueWrite || type == kTaskValueWait;
  refuse_unless(can_change && task.type == type, kRtParamInvalid,
                "the parameters are of another type of task than one that can be changed");
}

const TaskContent& latest(const Task& task) {
  return task.pending_content ? *task.pending_content : task.content;
}

// Only aclmdlRIKernelTaskGetAttribute reports attributes.
void put_kernel(const KernelContent& kernel, KernelTaskParameters& result) {
  result.function = as_handle<Function>(kernel.function->handle);
  result.configuration = nullptr;
  result.arguments = reinterpret_cast<void*>(kernel.arguments);
  result.is_host_arguments = 0;
  result.arguments_bytes = kernel.argument_bytes;
  result.n_blocks = kernel.n_blocks;
}

void put_parameters(const Task& task, ModelTaskParameters& result) {
  std::memset(&result, 0, sizeof result);
  result.type = task.type;
  result.task_group = as_handle<TaskGroup>(task.group);
  const TaskContent& content = latest(task);
  if (const auto* kernel = std::get_if<KernelContent>(&content)) {
    put_kernel(*kernel, result.kernel);
  } else if (const auto* event = std::get_if<EventContent>(&content)) {
    result.event_record = {as_handle<Event>(event->event->handle), event->event->flags,
                           event->flag};
  } else if (const auto* value = std::get_if<ValueContent>(&content)) {
    // A wait's parameters begin as a write's do.
    result.value_wait.address = reinterpret_cast<void*>(value->address);
    result.value_wait.value = value->value;
    if (task.type == kTaskValueWait) result.value_wait.flag = value->flag;
  }
}

// It keeps no launch attributes: without a configuration it has the defaults.
std::vector<LaunchAttribute> attributes_of(const LaunchConfiguration* configuration) {
  if (configuration == nullptr) return {};
  refuse_unless(configuration->attributes != nullptr, kRtParamInvalid, "the attributes are null");
  std::vector<LaunchAttribute> result(configuration->attributes,
                                      configuration->attributes + configuration->n_attributes);
  for (const auto& attribute : result) {
    refuse_unless(attribute.id >= kLaunchSchedulingMode && attribute.id <= kLaunchProfiling,
                  kRtParamInvalid, "no attribute has this number");
  }
  return result;
}

// isHostArgs: arguments of the host are copied now, unchanged, into a block of the runtime: words
// that point into them are not filled in. Others stay in the caller's memory, without requirements
// (UpdateKernelParams of hicann/runtime's kernel_utils.cc, isNoNeedH2DCopy).
KernelContent kernel_from(Runtime& state, const KernelTaskParameters& given) {
  KernelContent kernel;
  kernel.function = state.functions.find(as_number(given.function));
  refuse_unless(kernel.function != nullptr, kRtParamInvalid, "no function has this handle");
  refuse_unless(given.n_blocks != 0 && given.arguments != nullptr &&
                    given.arguments_bytes >= kernel.function->argument_bytes,
                kRtParamInvalid, "no blocks, no arguments, or too few");
  kernel.n_blocks = given.n_blocks;
  kernel.argument_bytes = given.arguments_bytes;
  kernel.attributes = attributes_of(given.configuration);
  if (given.is_host_arguments == 0) {
    // Without a handle to note the address in, it is lost (SetAicoreArgsSuperKernel, v100).
    keep_arguments(state, state.settings.keeps_addresses ? given.arguments : nullptr, kernel);
  } else {
    kernel.block = std::make_shared<const ArgumentBlock>(state.arguments, given.arguments_bytes);
    kernel.arguments = kernel.block->address;
    std::memcpy(reinterpret_cast<void*>(kernel.arguments), given.arguments, given.arguments_bytes);
  }
  return kernel;
}

// The block that holds the arguments lives on with the task, if they stay in it.
void keep_block(const Task& task, KernelContent& changed) {
  const auto& before = std::get<KernelContent>(latest(task));
  if (changed.block == nullptr && before.block != nullptr &&
      changed.arguments - before.block->address < before.block->n_bytes) {
    changed.block = before.block;
  }
}

// Engine, offset of blocks, prefetch and profiling are not reported (GetKernelAttribute of hicann/
// runtime's kernel_utils.cc).
bool is_told(LaunchAttributeId id) {
  return id == kLaunchSchedulingMode || id == kLaunchLocalMemoryBytes || id == kLaunchDataDump ||
         id == kLaunchTimeout || id == kLaunchTimeoutMicroseconds;
}

// A timeout is a single value, given in seconds or microseconds.
LaunchAttributeValue value_of(const KernelContent& kernel, LaunchAttributeId id) {
  constexpr std::uint64_t kMicroseconds = 1000000;
  LaunchAttributeValue result;
  std::memset(&result, 0, sizeof result);
  for (const auto& attribute : kernel.attributes) {
    const auto& given = attribute.value.timeout_microseconds;
    if (attribute.id == id) {
      result = attribute.value;
    } else if (attribute.id == kLaunchTimeout && id == kLaunchTimeoutMicroseconds) {
      const std::uint64_t all = attribute.value.timeout * kMicroseconds;
      result.timeout_microseconds = {static_cast<std::uint32_t>(all),
                                     static_cast<std::uint32_t>(all >> 32)};
    } else if (attribute.id == kLaunchTimeoutMicroseconds && id == kLaunchTimeout) {
      const std::uint64_t all = std::uint64_t{given.high} << 32 | given.low;
      result.timeout = static_cast<std::uint16_t>(all / kMicroseconds);
    }
  }
  return result;
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlRIGetStreams(Model handle, Stream* streams, std::uint32_t* count) {
  return call("aclmdlRIGetStreams", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    std::vector<std::uint64_t> handles;
    for (const auto& part : model_of(state, handle)->parts) handles.push_back(part->stream->handle);
    put_handles(handles, streams, count);
  });
}

ACL_EXPORT int aclmdlRIGetTasksByStream(Stream handle, ModelTask* tasks, std::uint32_t* count) {
  return call("aclmdlRIGetTasksByStream", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    const auto part = stream_of(state, handle)->part.lock();
    refuse_unless(part != nullptr, kRtStreamModel, "the stream belongs to no model");
    std::vector<std::uint64_t> handles;
    for (const auto& task : part->tasks) {
      const bool is_told = state.settings.tells_all_tasks || task->type != kTaskDefault;
      if (is_told) handles.push_back(task->handle);
    }
    put_handles(handles, tasks, count);
  });
}

ACL_EXPORT int aclmdlRITaskGetType(ModelTask task, ModelTaskType* type) {
  return call("aclmdlRITaskGetType", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(type, "the result");
    *type = task_of(state, task)->type;
  });
}

ACL_EXPORT int aclmdlRITaskGetSeqId(ModelTask task, std::uint32_t* id) {
  return call("aclmdlRITaskGetSeqId", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(id, "the result");
    *id = task_of(state, task)->id;
  });
}

ACL_EXPORT int aclmdlRITaskGetParams(ModelTask handle, ModelTaskParameters* parameters) {
  return call("aclmdlRITaskGetParams", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(parameters, "the result");
    const auto task = task_of(state, handle);
    require_software_sq(state, *task->model.lock());
    refuse_unless(task->type != kTaskDefault, kRtParamInvalid, "such tasks have no parameters");
    put_parameters(*task, *parameters);
  });
}

// The request takes effect at the next aclmdlRIUpdate.
ACL_EXPORT int aclmdlRITaskSetParams(ModelTask handle, ModelTaskParameters* parameters) {
  return call("aclmdlRITaskSetParams", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(parameters, "the parameters");
    const auto task = task_of(state, handle);
    change_task(state, *task, [&] {
      require_type(*task, parameters->type);
      refuse_unless(parameters->task_group == nullptr && task->group == 0, kRtParamInvalid,
                    "the task is in a group: that is updated as a whole");
      if (task->type == kTaskKernel) {
        auto changed = kernel_from(state, parameters->kernel);
        keep_block(*task, changed);
        task->pending_content = std::move(changed);
        return;
      }
      const auto& value = parameters->value_wait;
      const std::uint32_t flag = task->type == kTaskValueWait ? value.flag : 0;
      refuse_unless(as_number(value.address) % sizeof value.value == 0, kRtAddrUnaligned,
                    "the address is not aligned");
      task->pending_content = ValueContent{as_number(value.address), value.value, flag};
    });
  });
}

ACL_EXPORT int aclmdlRITaskDisable(ModelTask handle) {
  return call("aclmdlRITaskDisable", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    const auto task = task_of(state, handle);
    change_task(state, *task, [&] {
      refuse_unless(task->type != kTaskDefault, kRtParamInvalid, "such tasks are not disabled");
      task->pending_disable = true;
    });
  });
}

ACL_EXPORT int aclmdlRIUpdate(Model handle) {
  return call("aclmdlRIUpdate", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    const auto model = model_of(state, handle);
    require_software_sq(state, *model);
    refuse_unless(model->phase == ModelState::Phase::kReady, kRtModelCaptured,
                  "the model is being captured");
    refuse_unless(!model->is_faulty, kRtModelUpdateFailed, "a change of the model was refused");
    refuse_unless(!model->is_running(), kRtModelRunning, "the model runs");
    model->is_updating = false;
    std::size_t n_changed = 0;
    for (const auto& part : model->parts) {
      for (const auto& task : part->tasks) {
        if (!task->pending_content && !task->pending_disable) continue;
        ++n_changed;
        if (task->pending_content) task->content = std::move(*task->pending_content);
        task->pending_content.reset();
        task->is_disabled = task->is_disabled || task->pending_disable;
        task->pending_disable = false;
      }
    }
    trace(state, "tasks=%zu", n_changed);
  });
}

ACL_EXPORT int aclmdlRIKernelTaskGetAttribute(ModelTask handle, LaunchAttributeId id,
                                              LaunchAttributeValue* value) {
  return call("aclmdlRIKernelTaskGetAttribute", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(value, "the result");
    const auto task = task_of(state, handle);
    require_software_sq(state, *task->model.lock());
    const auto* kernel = std::get_if<KernelContent>(&latest(*task));
    refuse_unless(kernel != nullptr, kRtParamInvalid, "the task is no kernel");
    refuse_unless(is_told(id), kRtParamInvalid, "this attribute is not told");
    *value = value_of(*kernel, id);
  });
}
