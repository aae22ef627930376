// Capture: the rules that the runtime documents. A refused call leaves the capture as it was.
#include <algorithm>

#include "models.hpp"

namespace simulated_ascend {

namespace {

thread_local CaptureMode thread_mode = kCaptureGlobal;

void merge(Progress& into, const Progress& other) {
  for (const auto& [part, n_tasks] : other) into[part] = std::max(into[part], n_tasks);
}

// Everything that other streams of the capture hold precedes the origin's end.
bool is_joined(const Capture& capture) {
  const auto found = capture.progress.find(capture.origin);
  for (const auto& [stream, part] : capture.parts) {
    if (stream == capture.origin) continue;
    if (found == capture.progress.end()) return false;
    const auto reached = found->second.find(part.get());
    std::size_t n_tasks = part->tasks.size();  // records at the end need no wait
    while (n_tasks > 0 && part->tasks[n_tasks - 1]->type == kTaskEventRecord) --n_tasks;
    if (reached == found->second.end() || reached->second < n_tasks) return false;
  }
  return true;
}

// The streams leave the capture, which has ended.
void close(Runtime& state, const std::shared_ptr<Capture>& capture) {
  for (const auto& [handle, stream] : state.streams) {
    if (stream->capture == capture) stream->capture.reset();
  }
  state.captures.remove(capture->handle);
}

void drop(Runtime& state, const std::shared_ptr<Capture>& capture);

// Captures into the model's sub graphs end as well.
void drop_sub_graphs(Runtime& state, const ModelState& model) {
  for (const auto& other : state.captures.all()) {
    const auto condition = other->model->sub_graph_of.lock();
    if (condition != nullptr && condition->model.lock().get() == &model) drop(state, other);
  }
}

// A sub graph stays its model's, which can no longer be completed.
void drop(Runtime& state, const std::shared_ptr<Capture>& capture) {
  close(state, capture);
  drop_sub_graphs(state, *capture->model);
  if (capture->model->is_sub_graph()) {
    capture->model->phase = ModelState::Phase::kDropped;
  } else {
    remove_model(state, capture->model);
  }
}

void require_room(Runtime& state, const std::shared_ptr<Capture>& capture,
                  const ModelStream& part) {
  const std::size_t n_tasks = part.tasks.size();
  if (n_tasks == 0 || n_tasks % state.settings.stream_depth != 0) return;
  if (state.settings.software_sq) return;
  try {
    require_streams(state, part.stream->context.lock()->device, 1);
  } catch (const Refusal&) {
    capture->is_invalidated = true;
    throw;
  }
}

void require_group(const Capture& capture, const StreamState& stream, const Task& task) {
  if (capture.group_on == nullptr) return;
  refuse_unless(capture.group_on == &stream, kRtStreamTaskGroupIntr,
                "a task group is open on another stream of the model");
  refuse_unless(task.type == kTaskKernel, kRtTaskTypeNotSupport,
                "a task group takes kernels of the AI core only");
}

// Sub graphs are executed as a whole: waits for work outside are not simulated.
void require_possible_in_sub_graph(const ModelState& model, const Task& task) {
  if (!model.is_sub_graph()) return;
  const auto* event = std::get_if<EventContent>(&task.content);
  refuse_unless(task.type != kTaskValueWait && (event == nullptr || !event->is_external),
                kRtFeatureNotSupport, "a sub graph waits for no value and no external event");
}

std::shared_ptr<ModelStream> make_part(Runtime& state, const Capture& capture) {
  const auto context = capture.context.lock();
  if (!state.settings.software_sq) require_streams(state, context->device, 1);
  auto part = std::make_shared<ModelStream>();
  part->stream = make_stream(state, context, 0, 0);
  part->stream->model = capture.model;
  part->stream->part = part;
  capture.model->parts.push_back(part);
  return part;
}

}  // namespace

void reset_thread_mode() { thread_mode = kCaptureGlobal; }

void join_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                  const std::shared_ptr<Capture>& capture) {
  if (capture->parts.count(stream.get()) == 0) {
    capture->parts[stream.get()] = make_part(state, *capture);
  }
  stream->capture = capture;
}

void add_to_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                    const std::shared_ptr<Task>& task) {
  const auto capture = stream->capture;
  refuse_unless(!capture->is_invalidated, kRtStreamCaptureInvalidated, "the capture is invalid");
  require_group(*capture, *stream, *task);
  require_possible_in_sub_graph(*capture->model, *task);
  const auto part = capture->parts.at(stream.get());
  require_room(state, capture, *part);
  task->id = capture->model->n_tasks++;
  task->model = capture->model;
  part->tasks.push_back(state.tasks.add(task));
  capture->progress[stream.get()][part.get()] = part->tasks.size();
  if (capture->group_on != nullptr) capture->group.push_back(task);
}

namespace {

// Events of the pool cannot order streams of a model, unless they are external.
void require_capturable(const EventState& event) {
  refuse_unless(!event.is_pooled && (event.flags & kEventSync) != 0, kRtFeatureNotSupport,
                "events in a capture are made by aclrtCreateEventExWithFlag(ACL_EVENT_SYNC)");
}

// A call's own flag EXTERNAL (CANN 9.2) needs software SQ, and makes one record and one wait of an
// event in a model. The codes are not documented.
void require_first_by_flag(const Runtime& state, const StreamState& stream, ModelTaskType type,
                           const EventState& event, std::uint32_t flag) {
  if (flag == 0) return;
  refuse_unless(state.settings.software_sq, kRtFeatureNotSupport,
                "the flag EXTERNAL of a call needs software SQ");
  for (const auto& part : stream.capture->model->parts) {
    for (const auto& task : part->tasks) {
      const auto* content = std::get_if<EventContent>(&task->content);
      const bool is_another = content == nullptr || content->flag == 0 || task->type != type;
      refuse_unless(is_another || content->event.get() != &event, kRtFeatureNotSupport,
                    "by their own flag a model records an event once, and waits for it once");
    }
  }
}

}  // namespace

void record_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                       const std::shared_ptr<EventState>& event, bool is_external,
                       std::uint32_t flag) {
  if (!is_external) require_capturable(*event);
  require_first_by_flag(state, *stream, kTaskEventRecord, *event, flag);
  const auto task = make_task(kTaskEventRecord, EventContent{event, flag, is_external, nullptr});
  add_to_capture(state, stream, task);
  if (is_external) return;
  event->captured_in = stream->capture->model;
  event->record = task;
  event->progress = stream->capture->progress[stream.get()];
}

void wait_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                     const std::shared_ptr<EventState>& event, bool is_external,
                     std::uint32_t flag) {
  if (is_external) {
    require_first_by_flag(state, *stream, kTaskEventWait, *event, flag);
    add_to_capture(state, stream,
                   make_task(kTaskEventWait, EventContent{event, flag, true, nullptr}));
    return;
  }
  const auto model = event->captured_in.lock();
  if (stream->capture != nullptr) {
    require_capturable(*event);
    refuse_unless(model != nullptr, kRtCaptureDependency,
                  "the event was not recorded in this capture");
  }
  refuse_unless(model->phase == ModelState::Phase::kCapturing, kRtStreamCaptureConflict,
                "the event belongs to a model that is complete");
  if (stream->capture != nullptr) {
    refuse_unless(stream->capture->model == model, kRtStreamCaptureConflict,
                  "the event belongs to another model");
  } else {
    refuse_unless(stream->model.expired(), kRtStreamModel, "the stream is bound to a model");
    for (const auto& capture : state.captures.all()) {
      if (capture->model == model) join_capture(state, stream, capture);
    }
  }
  add_to_capture(state, stream,
                 make_task(kTaskEventWait, EventContent{event, 0, false, event->record.lock()}));
  merge(stream->capture->progress[stream.get()], event->progress);
}

std::shared_ptr<StreamState> capturable_stream(Runtime& state, Stream handle, CaptureMode mode) {
  require_capturing_chip(state);
  require_given(handle, "the stream");
  refuse_unless(mode >= kCaptureGlobal && mode <= kCaptureRelaxed, kRtParamInvalid,
                "no capture mode has this number");
  auto stream = stream_of(state, handle);
  refuse_unless((stream->flags & (kStreamCpuSchedule | kStreamDeviceUseOnly)) == 0,
                kRtInternalError, "streams with these flags cannot capture");
  refuse_unless(!is_default(*stream), kRtFeatureNotSupport, "the default stream cannot capture");
  refuse_unless(stream->model.expired(), kRtStreamModel, "the stream is bound to a model");
  require_not_capturing(*stream);
  return stream;
}

void begin_capture(Runtime& state, const std::shared_ptr<StreamState>& stream, CaptureMode mode,
                   const std::shared_ptr<ModelState>& model) {
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->context = current_context();
  capture->model = model;
  capture->origin = stream.get();
  join_capture(state, stream, capture);
  state.captures.add(capture);
}

void require_safe(const Runtime& state, int code) {
  const auto context = current_context();
  bool any = false;
  int strongest = kCaptureRelaxed, own = kCaptureRelaxed;
  for (const auto& capture : state.captures.all()) {
    if (capture->context.lock() != context) continue;
    any = true;
    strongest = std::min<int>(strongest, capture->mode);
    if (capture->thread == std::this_thread::get_id()) own = std::min<int>(own, capture->mode);
  }
  if (!any || thread_mode == kCaptureRelaxed) return;
  const bool refused = thread_mode == kCaptureGlobal
                           ? strongest == kCaptureGlobal || own == kCaptureThreadLocal
                           : own == kCaptureGlobal || own == kCaptureThreadLocal;
  refuse_unless(!refused, code, "a capture forbids this thread calls that may wait");
}

}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlRICaptureBegin(Stream handle, CaptureMode mode) {
  return call("aclmdlRICaptureBegin", Needs::kContext, [&](Runtime& state) {
    const auto stream = capturable_stream(state, handle, mode);
    trace(state, "mode=%d", mode);
    const auto model = make_model(state, /*is_captured=*/true);
    try {
      begin_capture(state, stream, mode, model);
    } catch (...) {
      remove_model(state, model);
      throw;
    }
  });
}

ACL_EXPORT int aclmdlRICaptureEnd(Stream handle, Model* model) {
  return call("aclmdlRICaptureEnd", Needs::kContext, [&](Runtime& state) {
    require_given(model, "the result");
    *model = nullptr;
    const auto stream = stream_of(state, handle);
    const auto capture = stream->capture;
    refuse_unless(capture != nullptr, kRtStreamNotCaptured, "the stream does not capture");
    refuse_unless(capture->origin == stream.get(), kRtStreamCaptureUnmatched,
                  "the capture began on another stream");
    const auto refuse_and_drop = [&](int code, const char* why) {
      drop(state, capture);
      refuse(code, why);
    };
    if (capture->mode != kCaptureRelaxed && capture->thread != std::this_thread::get_id()) {
      refuse_and_drop(kRtStreamCaptureWrongThread, "the capture began on another thread");
    }
    if (capture->is_invalidated) {
      refuse_and_drop(kRtStreamCaptureInvalidated, "an earlier failure invalidated the capture");
    }
    if (!are_sub_graphs_complete(*capture->model)) {
      refuse_and_drop(kRtSubAclgraphIsCapturing, "a sub graph was not captured to its end");
    }
    if (!is_joined(*capture)) {
      refuse_and_drop(kRtStreamUnjoined, "a stream of the capture was not joined");
    }
    refuse_unless(capture->group_on == nullptr, kRtStreamTaskGroupStatus, "a task group is open");
    close(state, capture);
    capture->model->phase = ModelState::Phase::kReady;
    *model = as_handle<Model>(capture->model->handle);
  });
}

ACL_EXPORT int aclmdlRICaptureGetInfo(Stream handle, CaptureStatus* status, Model* model) {
  return call("aclmdlRICaptureGetInfo", Needs::kContext, [&](Runtime& state) {
    require_given(status, "the status");
    const auto capture = stream_of(state, handle)->capture;
    *status = capture == nullptr        ? kCaptureNone
              : capture->is_invalidated ? kCaptureInvalidated
                                        : kCaptureActive;
    if (model == nullptr) return;
    *model = as_handle<Model>(capture == nullptr ? 0 : capture->model->handle);
  });
}

ACL_EXPORT int aclmdlRICaptureThreadExchangeMode(CaptureMode* mode) {
  return call("aclmdlRICaptureThreadExchangeMode", Needs::kInitialised, [&](Runtime& state) {
    require_given(mode, "the mode");
    refuse_unless(*mode >= kCaptureGlobal && *mode <= kCaptureRelaxed, kRtParamInvalid,
                  "no capture mode has this number");
    trace(state, "mode=%d", *mode);
    *mode = std::exchange(thread_mode, *mode);
  });
}

ACL_EXPORT int aclmdlRICaptureTaskGrpBegin(Stream handle) {
  return call("aclmdlRICaptureTaskGrpBegin", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    const auto capture = stream->capture;
    refuse_unless(capture != nullptr, kRtStreamNotCaptured, "the stream does not capture");
    refuse_unless(capture->group_on == nullptr, kRtStreamTaskGroupStatus,
                  "a task group is open already");
    capture->group_on = stream.get();
  });
}

ACL_EXPORT int aclmdlRICaptureTaskGrpEnd(Stream handle, TaskGroup* group) {
  return call("aclmdlRICaptureTaskGrpEnd", Needs::kContext, [&](Runtime& state) {
    require_given(group, "the result");
    const auto stream = stream_of(state, handle);
    const auto capture = stream->capture;
    refuse_unless(capture != nullptr, kRtStreamNotCaptured, "the stream does not capture");
    refuse_unless(capture->group_on == stream.get(), kRtStreamTaskGroupStatus,
                  "no task group is open on the stream");
    const std::uint64_t made = simulator::new_handle();
    for (const auto& task : capture->group) task->group = made;
    capture->model->groups[made] = std::move(capture->group);
    capture->group.clear();
    capture->group_on = nullptr;
    *group = as_handle<TaskGroup>(made);
  });
}

namespace {

const std::vector<std::shared_ptr<Task>>& group_of(Runtime& state, TaskGroup group) {
  for (const auto& model : state.models.all()) {
    const auto found = model->groups.find(as_number(group));
    if (found != model->groups.end()) return found->second;
  }
  refuse(kRtParamInvalid, "no task group has this handle: its model may be destroyed");
}

void require_updatable(const StreamState& stream) {
  require_not_capturing(stream);
  refuse_unless(stream.model.expired(), kRtStreamModel, "the stream is bound to a model");
}

// This many more tasks may be under update: the limit is that of drivers before HDK 25.5. The code
// is not documented.
void require_updates(const Runtime& state, std::size_t n_more) {
  std::size_t n_tasks = n_more;
  for (const auto& [handle, stream] : state.streams) {
    if (stream->update != nullptr) n_tasks += stream->update->targets.size();
  }
  refuse_unless(n_tasks <= state.settings.update_limit, kRtOverLimit,
                "too many tasks are under update");
}

}  // namespace

ACL_EXPORT int aclmdlRICaptureTaskUpdateBegin(Stream handle, TaskGroup group) {
  return call("aclmdlRICaptureTaskUpdateBegin", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    require_updatable(*stream);
    refuse_unless(stream->update == nullptr, kRtStreamTaskGroupStatus, "an update is open already");
    auto update = std::make_shared<GroupUpdate>();
    update->targets = group_of(state, group);
    require_updates(state, update->targets.size());
    stream->update = std::move(update);
  });
}

ACL_EXPORT int aclmdlRICaptureTaskUpdateEnd(Stream handle) {
  return call("aclmdlRICaptureTaskUpdateEnd", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    require_updatable(*stream);
    refuse_unless(stream->update != nullptr, kRtStreamTaskGroupStatus, "no update is open");
    const auto update = std::exchange(stream->update, nullptr);
    refuse_unless(update->contents.size() == update->targets.size(), kRtInternalError,
                  "the update has fewer tasks than the group");
    trace(state, "tasks=%zu", update->targets.size());
    submit(state, stream, simulator::Work(simulator::LateWork{[update](simulator::Runner&) {
             for (std::size_t index = 0; index < update->targets.size(); ++index) {
               update->targets[index]->content = update->contents[index];
             }
           }}));
  });
}
