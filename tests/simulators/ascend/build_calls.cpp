// Models that are built explicitly: persistent streams are bound, and keep their tasks.
#include <algorithm>

#include "models.hpp"

namespace simulated_ascend {
namespace {

std::shared_ptr<ModelState> built_model(Runtime& state, Model handle) {
  const auto model = model_of(state, handle);
  refuse_unless(!model->is_captured, kRtFeatureNotSupport, "the model was captured");
  return model;
}

std::shared_ptr<ModelState> open_model(Runtime& state, Model handle) {
  const auto model = built_model(state, handle);
  refuse_unless(model->phase == ModelState::Phase::kBuilding, kRtParamInvalid,
                "the model was completed by aclmdlRIBuildEnd");
  return model;
}

void require_bound(const StreamState& stream, const std::shared_ptr<ModelState>& model) {
  refuse_unless(stream.model.lock() == model, kRtStreamModel,
                "the stream is not bound to the model");
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlRIBuildBegin(Model* model, std::uint32_t flag) {
  return call("aclmdlRIBuildBegin", Needs::kContext, [&](Runtime& state) {
    require_given(model, "the result");
    refuse_unless(flag == 0, kRtParamInvalid, "the flag is reserved");
    *model = as_handle<Model>(make_model(state, /*is_captured=*/false)->handle);
  });
}

ACL_EXPORT int aclmdlRIBindStream(Model handle, Stream stream_handle, std::uint32_t flag) {
  return call("aclmdlRIBindStream", Needs::kContext, [&](Runtime& state) {
    require_given(stream_handle, "the stream");
    refuse_unless(flag == kModelStreamHead || flag == kModelStreamDefault, kRtParamInvalid,
                  "the flag is neither HEAD nor DEFAULT");
    const auto model = open_model(state, handle);
    const auto stream = stream_of(state, stream_handle);
    require_not_capturing(*stream);
    refuse_unless((stream->flags & kStreamPersistent) != 0, kRtStreamModel,
                  "the stream was made without ACL_STREAM_PERSISTENT");
    refuse_unless(stream->model.expired(), kRtStreamModel, "the stream is bound already");
    auto part = std::make_shared<ModelStream>();
    part->stream = stream;
    part->is_head = flag == kModelStreamHead;
    stream->model = model;
    stream->part = part;
    model->parts.push_back(std::move(part));
    trace(state, "model=%u stream=%d", model->id, stream->id);
  });
}

ACL_EXPORT int aclmdlRIEndTask(Model handle, Stream stream_handle) {
  return call("aclmdlRIEndTask", Needs::kContext, [&](Runtime& state) {
    const auto model = open_model(state, handle);
    const auto stream = stream_of(state, stream_handle);
    require_not_capturing(*stream);
    require_bound(*stream, model);
    submit(state, stream, make_task(kTaskDefault, EndContent{}));
  });
}

ACL_EXPORT int aclmdlRIBuildEnd(Model handle, void* reserve) {
  return call("aclmdlRIBuildEnd", Needs::kContext, [&](Runtime& state) {
    refuse_unless(reserve == nullptr, kRtParamInvalid, "the second argument is reserved");
    const auto model = open_model(state, handle);
    bool has_head = false, has_end = false;
    for (const auto& part : model->parts) {
      has_head = has_head || part->is_head;
      for (const auto& task : part->tasks) {
        has_end = has_end || std::holds_alternative<EndContent>(task->content);
      }
    }
    refuse_unless(has_head && has_end, kRtInternalError,
                  "the model has no head stream or no end task: it would never begin or end");
    model->phase = ModelState::Phase::kReady;
  });
}

ACL_EXPORT int aclmdlRIUnbindStream(Model handle, Stream stream_handle) {
  return call("aclmdlRIUnbindStream", Needs::kContext, [&](Runtime& state) {
    const auto model = built_model(state, handle);
    const auto stream = stream_of(state, stream_handle);
    require_not_capturing(*stream);
    require_bound(*stream, model);
    refuse_unless(!model->is_running(), kRtModelRunning, "the model runs");
    const auto part = stream->part.lock();
    for (const auto& task : part->tasks) state.tasks.remove(task->handle);
    stream->model.reset();
    stream->part.reset();
    auto& parts = model->parts;
    parts.erase(std::find(parts.begin(), parts.end(), part));
  });
}

// Starts a stream of the same model that is not a head.
ACL_EXPORT int aclrtActiveStream(Stream active_handle, Stream handle) {
  return call_on("aclrtActiveStream", handle, [&](Runtime& state, const auto& stream) {
    const auto active = stream_of(state, active_handle);
    const auto model = stream->model.lock();
    refuse_unless(model != nullptr && active->model.lock() == model, kRtStreamModel,
                  "the streams are not bound to one model");
    submit(state, stream, make_task(kTaskDefault, ActivateContent{active->part}));
  });
}
