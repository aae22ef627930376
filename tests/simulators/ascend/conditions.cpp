// Conditional tasks and the sub graphs that they execute. Sources: the runtime's
// docs/zh/design/features/aclgraph.md (2.5, 4.1, 5.6) and, in docs/zh/api_ref,
// 15_model_running_instance__management.md.
#include <algorithm>
#include <cstring>

#include "ascend/acl_tasks.hpp"
#include "models.hpp"

namespace simulated_ascend {
namespace {

std::uint64_t value_of(const ConditionState& condition) {
  return *reinterpret_cast<const std::uint64_t*>(condition.value->address);
}

void assign(const ConditionState& condition, std::uint64_t value) {
  *reinterpret_cast<std::uint64_t*>(condition.value->address) = value;
}

// In the order of their capture, in which every wait comes after its record.
void perform_all(Runtime& state, const ModelState& sub_graph, simulator::Runner& runner) {
  std::vector<std::shared_ptr<Task>> tasks;
  for (const auto& part : sub_graph.parts) {
    tasks.insert(tasks.end(), part->tasks.begin(), part->tasks.end());
  }
  std::sort(tasks.begin(), tasks.end(),
            [](const auto& one, const auto& other) { return one->id < other->id; });
  for (const auto& task : tasks) {
    if (state.device.scheduler.fault()) return;
    perform(state, *task, runner);
  }
}

std::shared_ptr<ConditionState> condition_of(Runtime& state, ModelCondition handle) {
  const auto found = state.conditions.find(as_number(handle));
  refuse_unless(found != nullptr, kRtParamInvalid, "no condition has this handle");
  return found;
}

void require_software_sq(const Runtime& state) {
  refuse_unless(state.settings.software_sq, kRtFeatureNotSupport,
                "the firmware has no software SQ");
}

void require_size(ModelConditionType type, std::uint32_t n_models) {
  const bool fits = type == kConditionIf       ? n_models == 1 || n_models == 2
                    : type == kConditionWhile  ? n_models == 1
                    : type == kConditionSwitch ? n_models > 0
                                               : false;
  refuse_unless(fits, kRtParamInvalid, "no condition of this type has so many sub graphs");
}

std::shared_ptr<ModelState> make_sub_graph(Runtime& state,
                                           const std::shared_ptr<ConditionState>& condition) {
  auto model = make_model(state, /*is_captured=*/true);
  model->phase = ModelState::Phase::kAwaitingCapture;
  model->sub_graph_of = condition;
  return model;
}

}  // namespace

bool are_sub_graphs_complete(const ModelState& model) {
  for (const auto& condition : model.conditions) {
    for (const auto& sub_graph : condition->sub_graphs) {
      if (sub_graph->phase != ModelState::Phase::kReady) return false;
    }
  }
  return true;
}

void assign_defaults(const ModelState& model) {
  for (const auto& condition : model.conditions) {
    if (condition->assigns_default) assign(*condition, condition->default_value);
    for (const auto& sub_graph : condition->sub_graphs) assign_defaults(*sub_graph);
  }
}

void perform(Runtime& state, const ConditionState& condition, simulator::Runner& runner) {
  const auto& sub_graphs = condition.sub_graphs;
  if (condition.type == kConditionWhile) {
    // A device would never end; here the caller gets an error.
    for (std::size_t round = 0; value_of(condition) != 0; ++round) {
      if (round == state.settings.loop_limit) runner.fail(simulator::Status::kLaunchFailed);
      if (state.device.scheduler.fault()) return;
      perform_all(state, *sub_graphs.front(), runner);
    }
    return;
  }
  const std::uint64_t value = value_of(condition);
  if (condition.type == kConditionIf) {
    const std::size_t place = value != 0 ? 0 : 1;
    if (place < sub_graphs.size()) perform_all(state, *sub_graphs[place], runner);
  } else if (value < sub_graphs.size()) {
    perform_all(state, *sub_graphs[value], runner);
  } else {  // the behaviour is not documented
    runner.fail(simulator::Status::kLaunchFailed);
  }
}

}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlRICondHandleCreate(Model handle, std::uint32_t default_value,
                                        ModelConditionFlag flag, ModelCondition* result) {
  return call("aclmdlRICondHandleCreate", Needs::kContext, [&](Runtime& state) {
    require_telling_chip(state);
    require_given(result, "the result");
    refuse_unless(flag == 0 || flag == kConditionAssignDefault, kRtParamInvalid,
                  "no flag of conditions has this number");
    const auto model = model_of(state, handle);
    refuse_unless(model->is_captured, kRtFeatureNotSupport, "the model was not captured");
    refuse_unless(model->phase == ModelState::Phase::kCapturing, kRtParamInvalid,
                  "the model is not being captured");
    require_software_sq(state);
    auto condition = std::make_shared<ConditionState>();
    condition->model = model;
    condition->default_value = default_value;
    condition->assigns_default = flag == kConditionAssignDefault;
    condition->value =
        std::make_shared<const ArgumentBlock>(state.arguments, sizeof(std::uint64_t));
    assign(*condition, 0);
    model->conditions.push_back(state.conditions.add(condition));
    *result = as_handle<ModelCondition>(condition->handle);
  });
}

ACL_EXPORT int aclmdlRICondHandleGetCondPtr(ModelCondition handle, std::uint64_t** result) {
  return call("aclmdlRICondHandleGetCondPtr", Needs::kContext, [&](Runtime& state) {
    require_given(result, "the result");
    require_software_sq(state);
    *result = reinterpret_cast<std::uint64_t*>(condition_of(state, handle)->value->address);
  });
}

// Makes the sub graphs, which are then captured one by one.
ACL_EXPORT int aclmdlRIAddCondTask(ModelConditionParameters parameters, Stream handle,
                                   std::uint32_t flags) {
  return call_on("aclmdlRIAddCondTask", handle, [&](Runtime& state, const auto& stream) {
    require_given(handle, "the stream");
    require_given(parameters.models, "the result");
    refuse_unless(flags == 0, kRtParamInvalid, "the flags are reserved");
    require_software_sq(state);
    const auto condition = condition_of(state, parameters.handle);
    refuse_unless(!condition->is_used, kRtParamInvalid, "another task has this condition");
    require_size(parameters.type, parameters.n_models);
    refuse_unless(stream->capture != nullptr, kRtStreamNotCaptured, "the stream does not capture");
    refuse_unless(condition->model.lock() == stream->capture->model, kRtParamInvalid,
                  "the condition was made on another model");
    add_to_capture(state, stream, make_task(kTaskDefault, ConditionContent{condition}));
    condition->is_used = true;
    condition->type = parameters.type;
    for (std::uint32_t index = 0; index < parameters.n_models; ++index) {
      condition->sub_graphs.push_back(make_sub_graph(state, condition));
      parameters.models[index] = as_handle<Model>(condition->sub_graphs.back()->handle);
    }
    trace(state, "type=%d models=%u", parameters.type, parameters.n_models);
  });
}

// Into a sub graph that aclmdlRIAddCondTask made: no source documents other models.
ACL_EXPORT int aclmdlRICaptureToModelRIBegin(Stream handle, Model model_handle, CaptureMode mode) {
  return call("aclmdlRICaptureToModelRIBegin", Needs::kContext, [&](Runtime& state) {
    require_software_sq(state);
    const auto stream = capturable_stream(state, handle, mode);
    const auto model = model_of(state, model_handle);
    refuse_unless(model->phase == ModelState::Phase::kAwaitingCapture, kRtParamInvalid,
                  "the model is no sub graph that waits for its capture");
    trace(state, "model=%u mode=%d", model->id, mode);
    begin_capture(state, stream, mode, model);
    model->phase = ModelState::Phase::kCapturing;
  });
}
