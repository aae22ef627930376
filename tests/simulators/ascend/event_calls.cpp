// Events, and waits for values in memory.
#include "models.hpp"

namespace simulated_ascend {
namespace {

constexpr std::uint32_t kFlagExternal = 1;  // of a record or wait

// Flags that both functions accept together, and those that each accepts alone (hicann/runtime,
// EventCreate and EventCreateEx of api_error.cc). Events that are external or of the device alone
// belong to the pool.
void require_event_flags(std::uint32_t flags, bool is_pooled) {
  constexpr std::uint32_t kTogether = kEventSync | kEventCaptureStreamProgress | kEventTimeline;
  const bool is_alone =
      is_pooled ? flags == kEventDeviceUseOnly || flags == kEventExternal : flags == kEventIpc;
  refuse_unless(is_alone || (flags != 0 && (flags & ~kTogether) == 0), kRtParamInvalid,
                "this function makes no event with these flags");
}

EventState& put_event(Runtime& state, Event* result, std::uint32_t flags, bool is_pooled) {
  require_given(result, "the result");
  require_event_flags(flags, is_pooled);
  trace(state, "flags=%u", flags);
  if (is_pooled) {
    refuse_unless(state.n_pooled_events < state.settings.event_limit, kRtNoEventResource,
                  "all events of the pool are in use");
    ++state.n_pooled_events;
  }
  const auto event = state.events.add(std::make_shared<EventState>());
  event->flags = flags;
  event->is_pooled = is_pooled;
  event->id = state.next_event_id++;
  *result = as_handle<Event>(event->handle);
  return *event;
}

// The default stream may not touch an event of an active capture.
void require_not_implicit(const StreamState& stream, const EventState& event) {
  const auto model = event.captured_in.lock();
  refuse_unless(
      model == nullptr || model->phase != ModelState::Phase::kCapturing || !is_default(stream),
      kRtStreamCaptureImplicit, "the default stream would depend on a capture");
}

// Only events of aclrtCreateEventWithFlag order streams of a model that is built (hicann/runtime,
// EventRecord and StreamWaitEvent of api_impl.cc).
void require_bindable(const StreamState& stream, const EventState& event) {
  refuse_unless(stream.model.expired() || (event.is_pooled && !event.is_default),
                kRtFeatureNotSupport,
                "on a stream that is bound to a model: an event of another function than "
                "aclrtCreateEventWithFlag");
}

// Only a stream may wait for external events (hicann/runtime, api_error.cc).
void require_not_external(const EventState& event) {
  refuse_unless(!event.is_external(), kRtFeatureNotSupport,
                "an external event is not waited for, asked or timed by the host");
}

std::shared_ptr<Task> external_task(ModelTaskType type, const std::shared_ptr<EventState>& event,
                                    std::uint32_t flag) {
  return make_task(type, EventContent{event, flag, true, nullptr});
}

void record(Runtime& state, const std::shared_ptr<StreamState>& stream, Event handle,
            std::uint32_t flag) {
  const auto event = event_of(state, handle);
  require_bindable(*stream, *event);
  require_not_implicit(*stream, *event);
  const bool is_external = event->is_external() || flag == kFlagExternal;
  if (stream->capture != nullptr) {
    record_in_capture(state, stream, event, is_external, flag);
    return;
  }
  if (!stream->model.expired() || is_external) {
    const auto task = make_task(kTaskEventRecord, EventContent{event, flag, is_external, nullptr});
    submit(state, stream, task);
    event->record = task;
    if (!stream->model.expired()) return;
  }
  if (const auto fault = state.device.scheduler.fault()) throw simulator::DeviceError(*fault);
  event->captured_in.reset();
  event->mark = state.device.scheduler.record(*stream->queue);
}

// In a model that is built, a wait is for the record of the same event in that model.
void wait_in_build(Runtime& state, const std::shared_ptr<StreamState>& stream,
                   const std::shared_ptr<EventState>& event) {
  const auto record = event->record.lock();
  refuse_unless(record != nullptr && record->model.lock() == stream->model.lock(), kRtStreamModel,
                "the event was not recorded in the stream's model");
  submit(state, stream, make_task(kTaskEventWait, EventContent{event, 0, false, record}));
}

void wait(Runtime& state, const std::shared_ptr<StreamState>& stream, Event handle,
          std::uint32_t flag) {
  const auto event = event_of(state, handle);
  require_bindable(*stream, *event);
  require_not_implicit(*stream, *event);
  const bool is_external = event->is_external() || flag == kFlagExternal;
  if (stream->capture != nullptr || (!is_external && !event->captured_in.expired())) {
    wait_in_capture(state, stream, event, is_external, flag);
  } else if (is_external) {
    submit(state, stream, external_task(kTaskEventWait, event, flag));
  } else if (!stream->model.expired()) {
    wait_in_build(state, stream, event);
  } else {
    if (const auto fault = state.device.scheduler.fault()) throw simulator::DeviceError(*fault);
    if (event->mark == nullptr) return;
    state.device.scheduler.wait(*stream->queue, event->mark);
    event->last_wait = state.device.scheduler.record(*stream->queue);
  }
}

bool is_done(const std::shared_ptr<simulator::Mark>& mark) { return mark == nullptr || mark->done; }

// Whether it was done at the query. Work is always late: now it is done.
bool was_done(Runtime& state, const std::shared_ptr<simulator::Mark>& mark) {
  if (is_done(mark)) return true;
  try {
    state.device.scheduler.run_until(mark);
  } catch (const simulator::DeviceError& error) {
    if (error.status != simulator::Status::kBlocked) throw;
  }
  return false;
}

void synchronize(Runtime& state, Event handle, int timeout_ms) {
  const auto event = event_of(state, handle);
  require_not_external(*event);
  require_not_captured(*event);
  if (event->mark == nullptr) return;
  patiently(state, timeout_ms, kRtEventSyncTimeout,
            [&] { state.device.scheduler.run_until(event->mark); });
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclrtCreateEvent(Event* event) {
  return call("aclrtCreateEvent", Needs::kContext, [&](Runtime& state) {
    put_event(state, event, kEventSync | kEventTimeline, /*is_pooled=*/true).is_default = true;
  });
}

ACL_EXPORT int aclrtCreateEventWithFlag(Event* event, std::uint32_t flags) {
  return call("aclrtCreateEventWithFlag", Needs::kContext,
              [&](Runtime& state) { put_event(state, event, flags, /*is_pooled=*/true); });
}

ACL_EXPORT int aclrtCreateEventExWithFlag(Event* event, std::uint32_t flags) {
  return call("aclrtCreateEventExWithFlag", Needs::kContext,
              [&](Runtime& state) { put_event(state, event, flags, /*is_pooled=*/false); });
}

ACL_EXPORT int aclrtDestroyEvent(Event event) {
  return call("aclrtDestroyEvent", Needs::kInitialised, [&](Runtime& state) {
    const auto found = event_of(state, event);
    if (found->is_pooled) --state.n_pooled_events;
    state.events.remove(found->handle);
  });
}

ACL_EXPORT int aclrtRecordEvent(Event event, Stream handle) {
  return call_on("aclrtRecordEvent", handle,
                 [&](Runtime& state, const auto& stream) { record(state, stream, event, 0); });
}

ACL_EXPORT int aclrtRecordEventWithFlag(Event event, Stream handle, std::uint32_t flag) {
  return call_on("aclrtRecordEventWithFlag", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(flag <= kFlagExternal, kRtParamInvalid, "the flag is unknown");
    record(state, stream, event, flag);
  });
}

ACL_EXPORT int aclrtResetEvent(Event handle, Stream stream_handle) {
  return call_on("aclrtResetEvent", stream_handle, [&](Runtime& state, const auto& stream) {
    const auto event = event_of(state, handle);
    refuse_unless(event->is_pooled, kRtFeatureNotSupport,
                  "events of aclrtCreateEventExWithFlag are not reset");
    require_not_implicit(*stream, *event);
    submit(state, stream, external_task(kTaskEventReset, event, 0));
  });
}

ACL_EXPORT int aclrtStreamWaitEvent(Stream handle, Event event) {
  return call_on("aclrtStreamWaitEvent", handle,
                 [&](Runtime& state, const auto& stream) { wait(state, stream, event, 0); });
}

ACL_EXPORT int aclrtStreamWaitEventWithFlag(Stream handle, Event event, std::uint32_t,
                                            std::uint32_t flag) {
  return call_on("aclrtStreamWaitEventWithFlag", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(flag <= kFlagExternal, kRtParamInvalid, "the flag is unknown");
    wait(state, stream, event, flag);
  });
}

ACL_EXPORT int aclrtQueryEventStatus(Event handle, EventRecordedStatus* status) {
  return call("aclrtQueryEventStatus", Needs::kContext, [&](Runtime& state) {
    require_given(status, "the result");
    const auto event = event_of(state, handle);
    require_not_external(*event);
    require_not_captured(*event);
    *status = was_done(state, event->mark) ? kEventRecordedComplete : kEventRecordedNotReady;
  });
}

ACL_EXPORT int aclrtQueryEvent(Event handle, EventStatus* status) {
  return call("aclrtQueryEvent", Needs::kContext, [&](Runtime& state) {
    require_given(status, "the result");
    const auto event = event_of(state, handle);
    require_not_external(*event);
    require_not_captured(*event);
    *status = was_done(state, event->mark) ? kEventComplete : kEventNotReady;
  });
}

ACL_EXPORT int aclrtQueryEventWaitStatus(Event handle, EventWaitStatus* status) {
  return call("aclrtQueryEventWaitStatus", Needs::kContext, [&](Runtime& state) {
    require_given(status, "the result");
    const auto event = event_of(state, handle);
    require_not_external(*event);
    require_not_captured(*event);
    *status = was_done(state, event->last_wait) ? kEventWaitComplete : kEventWaitNotReady;
  });
}

ACL_EXPORT int aclrtSynchronizeEvent(Event event) {
  return call("aclrtSynchronizeEvent", Needs::kContext,
              [&](Runtime& state) { synchronize(state, event, -1); });
}

ACL_EXPORT int aclrtSynchronizeEventWithTimeout(Event event, std::int32_t timeout_ms) {
  return call("aclrtSynchronizeEventWithTimeout", Needs::kContext, [&](Runtime& state) {
    refuse_unless(timeout_ms >= -1, kRtParamInvalid, "the time is below -1");
    synchronize(state, event, timeout_ms);
  });
}

namespace {

std::int64_t recorded_at_ns(Runtime& state, Event handle) {
  const auto event = event_of(state, handle);
  require_not_external(*event);
  require_not_captured(*event);
  refuse_unless((event->flags & kEventTimeline) != 0, kRtEventTimestampInvalid,
                "the event was made without ACL_EVENT_TIME_LINE");
  refuse_unless(event->mark != nullptr && event->mark->done, kRtEventTimestampInvalid,
                "the event was not reached");
  return event->mark->at_ns;
}

}  // namespace

ACL_EXPORT int aclrtEventElapsedTime(float* milliseconds, Event begin, Event end) {
  return call("aclrtEventElapsedTime", Needs::kContext, [&](Runtime& state) {
    constexpr double kNsInMs = 1e6;
    require_given(milliseconds, "the result");
    const std::int64_t elapsed_ns = recorded_at_ns(state, end) - recorded_at_ns(state, begin);
    refuse_unless(elapsed_ns >= 0, kRtEventTimestampReversal, "the end lies before the begin");
    *milliseconds = static_cast<float>(static_cast<double>(elapsed_ns) / kNsInMs);
  });
}

ACL_EXPORT int aclrtEventGetTimestamp(Event event, std::uint64_t* microseconds) {
  return call("aclrtEventGetTimestamp", Needs::kContext, [&](Runtime& state) {
    constexpr std::int64_t kNsInUs = 1000;
    require_given(microseconds, "the result");
    *microseconds = static_cast<std::uint64_t>(recorded_at_ns(state, event) / kNsInUs);
  });
}

ACL_EXPORT int aclrtGetEventId(Event event, std::uint32_t* id) {
  return call("aclrtGetEventId", Needs::kContext, [&](Runtime& state) {
    require_given(id, "the result");
    *id = event_of(state, event)->id;
  });
}

namespace {

void submit_value(Runtime& state, const std::shared_ptr<StreamState>& stream, ModelTaskType type,
                  void* address, std::uint64_t value, std::uint32_t flag) {
  const std::uint64_t number = as_number(address);
  refuse_unless(number % sizeof value == 0, kRtAddrUnaligned, "the address is not aligned");
  refuse_unless(!state.device.memory.covering(number, sizeof value).empty(), kRtParamInvalid,
                "no device memory lies there");
  submit(state, stream, make_task(type, ValueContent{number, value, flag}));
}

}  // namespace

ACL_EXPORT int aclrtValueWrite(void* address, std::uint64_t value, std::uint32_t flag,
                               Stream handle) {
  return call_on("aclrtValueWrite", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(flag == 0, kRtParamInvalid, "the flag is reserved");
    submit_value(state, stream, kTaskValueWrite, address, value, flag);
  });
}

ACL_EXPORT int aclrtValueWait(void* address, std::uint64_t value, std::uint32_t flag,
                              Stream handle) {
  return call_on("aclrtValueWait", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(flag <= kWaitValueNor, kRtParamInvalid, "the flag is unknown");
    submit_value(state, stream, kTaskValueWait, address, value, flag);
  });
}
