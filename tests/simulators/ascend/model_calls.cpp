// Execution, destruction and descriptions of models.
#include <cstring>
#include <fstream>

#include "models.hpp"
#include "symbols.hpp"

namespace simulated_ascend {
namespace {

// Sub graphs are executed and destroyed with their model. The refusal here is documented, the code
// is not.
void require_own(const ModelState& model) {
  refuse_unless(!model.is_sub_graph(), kRtFeatureNotSupport, "the model is a sub graph");
}

void require_executable(const ModelState& model) {
  refuse_unless(model.phase != ModelState::Phase::kCapturing, kRtModelCaptured,
                "the model is being captured");
  refuse_unless(model.phase == ModelState::Phase::kReady, kRtModelExecute,
                "the model was not completed by aclmdlRIBuildEnd");
  refuse_unless(!model.is_updating && !model.is_faulty, kRtModelExecute,
                "a task of the model was changed without an update, or a change was refused");
  require_own(model);
}

// Lets the device advance, as while the caller polls.
void let_end(Runtime& state, ModelState& model) {
  for (int poll = 0; model.is_running(); ++poll) {
    const auto executions = model.executions;
    try {
      for (const auto& mark : executions) state.device.scheduler.run_until(mark);
    } catch (const simulator::DeviceError& error) {
      if (error.status != simulator::Status::kBlocked) return;  // a fault ended it
    }
    if (!model.is_running()) return;
    refuse_unless(poll < state.settings.destroy_polls, kRtModelRunning, "the model still runs");
    let_time_pass(state);
  }
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlRIExecuteAsync(Model handle, Stream stream_handle) {
  return call("aclmdlRIExecuteAsync", Needs::kContext, [&](Runtime& state) {
    const auto model = model_of(state, handle);
    const auto stream = stream_of(state, stream_handle);
    trace(state, "model=%u stream=%d", model->id, stream->id);
    require_not_capturing(*stream);
    require_executable(*model);
    execute(state, model, *stream);
  });
}

ACL_EXPORT int aclmdlRIExecute(Model handle, std::int32_t timeout_ms) {
  return call("aclmdlRIExecute", Needs::kContext, [&](Runtime& state) {
    const auto model = model_of(state, handle);
    trace(state, "model=%u", model->id);
    refuse_unless(timeout_ms >= -1, kRtParamInvalid, "the time is below -1");
    require_executable(*model);
    if (model->inner == nullptr) model->inner = make_stream(state, current_context(), 0, 0);
    execute(state, model, *model->inner);
    patiently(state, timeout_ms, kRtStreamSyncTimeout,
              [&] { state.device.scheduler.run(model->inner->queue); });
  });
}

// An unknown or destroyed model is no error.
ACL_EXPORT int aclmdlRIDestroy(Model handle) {
  std::vector<std::pair<HostFunction, void*>> callbacks;
  const int code = call("aclmdlRIDestroy", Needs::kInitialised, [&](Runtime& state) {
    const auto model = state.models.find(as_number(handle));
    if (model == nullptr) return;
    refuse_unless(model->phase != ModelState::Phase::kCapturing, kRtModelCaptured,
                  "the model is being captured");
    require_own(*model);
    let_end(state, *model);
    callbacks = std::move(model->on_destroy);
    remove_model(state, model);
  });
  for (const auto& [function, user_data] : callbacks) function(user_data);
  return code;
}

ACL_EXPORT int aclmdlRIDestroyRegisterCallback(Model handle, HostFunction function,
                                               void* user_data) {
  return call("aclmdlRIDestroyRegisterCallback", Needs::kContext, [&](Runtime& state) {
    refuse_unless(function != nullptr, kRtParamInvalid, "the function is null");
    model_of(state, handle)->on_destroy.emplace_back(function, user_data);
  });
}

ACL_EXPORT int aclmdlRIDestroyUnregisterCallback(Model handle, HostFunction function) {
  return call("aclmdlRIDestroyUnregisterCallback", Needs::kContext, [&](Runtime& state) {
    auto& callbacks = model_of(state, handle)->on_destroy;
    for (auto entry = callbacks.begin(); entry != callbacks.end(); ++entry) {
      if (entry->first != function) continue;
      callbacks.erase(entry);
      return;
    }
    refuse(kRtParamInvalid, "the function was not registered");
  });
}

ACL_EXPORT int aclmdlRIAbort(Model handle) {
  return call("aclmdlRIAbort", Needs::kContext, [&](Runtime& state) {
    const auto model = model_of(state, handle);
    refuse_unless(!model->is_captured, kRtFeatureNotSupport,
                  "models that were captured cannot be aborted");
    for (const auto& part : model->parts) state.device.scheduler.drop(*part->stream->queue);
  });
}

ACL_EXPORT int aclmdlRISetName(Model handle, const char* name) {
  return call("aclmdlRISetName", Needs::kContext, [&](Runtime& state) {
    require_given(name, "the name");
    const auto model = model_of(state, handle);
    refuse_unless(std::strlen(name) <= kMaxModelNameLength, kRtParamInvalid,
                  "names have at most 512 bytes");
    model->name = name;
  });
}

ACL_EXPORT int aclmdlRIGetName(Model handle, std::uint32_t room, char* name) {
  return call("aclmdlRIGetName", Needs::kContext, [&](Runtime& state) {
    require_given(name, "the result");
    const auto model = model_of(state, handle);
    refuse_unless(room > model->name.size(), kRtParamInvalid, "the name does not fit");
    std::memcpy(name, model->name.c_str(), model->name.size() + 1);
  });
}

ACL_EXPORT int aclmdlRIGetId(Model handle, std::uint32_t* id) {
  return call("aclmdlRIGetId", Needs::kContext, [&](Runtime& state) {
    require_given(id, "the result");
    *id = model_of(state, handle)->id;
  });
}

namespace {

const char* type_name(const Task& task) {
  if (std::holds_alternative<simulator::Work>(task.content)) {
    const auto& work = std::get<simulator::Work>(task.content);
    if (std::holds_alternative<simulator::Fill>(work)) return "MEMSET";
    if (std::holds_alternative<simulator::HostCall>(work)) return "HOST_FUNC";
    return "MEMCPY_ASYNC";
  }
  constexpr const char* kNames[] = {"MODEL",       "KERNEL",      "EVENT_RECORD", "EVENT_WAIT",
                                    "EVENT_RESET", "VALUE_WRITE", "VALUE_WAIT"};
  return kNames[task.type];
}

std::string words_of(Runtime& state, const KernelContent& kernel) {
  std::string result;
  const std::size_t n_words = kernel.argument_bytes / sizeof(std::uint64_t);
  if (n_words == 0 || state.device.memory.covering(kernel.arguments, kernel.argument_bytes).empty())
    return result;
  const auto* word = reinterpret_cast<const std::uint64_t*>(kernel.arguments);
  for (std::size_t index = 0; index < n_words; ++index) {
    result +=
        text("%s0x%016llx", index == 0 ? "" : ",", static_cast<unsigned long long>(word[index]));
  }
  return result;
}

// One event of the trace format that browsers show.
std::string json_of(Runtime& state, const ModelState& model, const ModelStream& part,
                    const Task& task, bool is_verbose) {
  const auto* kernel = std::get_if<KernelContent>(&task.content);
  std::string result = text(
      "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%u,\"tid\":%d,\"ts\":%u,\"dur\":1,\"args\":{"
      "\"Model Id\":%u,\"Stream Id\":%d,\"Task Id\":%u,\"Task Type\":\"%s\"",
      kernel == nullptr ? type_name(task) : kernel->function->name.c_str(), model.id,
      part.stream->id, task.id, model.id, part.stream->id, task.id, type_name(task));
  if (kernel != nullptr) {
    result += text(",\"Numblocks\":%u", kernel->n_blocks);
    if (is_verbose) {
      result += text(",\"Kernel Args Size\":%zu,\"Kernel Args\":\"", kernel->argument_bytes) +
                words_of(state, *kernel) + "\"";
    }
  }
  return result + "}}";
}

std::string json_of(Runtime& state, const ModelState& model, bool is_verbose) {
  std::string result = "[";
  for (const auto& part : model.parts) {
    for (const auto& task : part->tasks) {
      if (result.size() > 1) result += ",\n";
      result += json_of(state, model, *part, *task, is_verbose);
    }
  }
  return result + "]\n";
}

}  // namespace

ACL_EXPORT int aclmdlRIDebugJsonPrint(Model handle, const char* path, std::uint32_t flags) {
  return call("aclmdlRIDebugJsonPrint", Needs::kContext, [&](Runtime& state) {
    require_given(path, "the path");
    refuse_unless(flags <= kDebugJsonVerbose, kRtParamInvalid, "the flag is unknown");
    const auto model = model_of(state, handle);
    std::ofstream file(path);
    refuse_unless(file.good(), kRtFileOpen, "the file cannot be opened");
    // Before CANN 9.1 the arguments are not reported. The flag's effect there is not documented.
    file << json_of(state, *model, flags == kDebugJsonVerbose && has_verbose_json());
    file.flush();
    refuse_unless(file.good(), kRtFileWrite, "the file cannot be written");
  });
}

ACL_EXPORT int aclmdlRIDebugPrint(Model handle) {
  return call("aclmdlRIDebugPrint", Needs::kContext, [&](Runtime& state) {
    std::fputs(json_of(state, *model_of(state, handle), false).c_str(), stderr);
  });
}
