// Streams and host functions.
#include "models.hpp"

namespace simulated_ascend {
namespace {

void put_stream(Runtime& state, Stream* result, std::uint32_t priority, std::uint32_t flags) {
  require_given(result, "the result");
  const auto context = current_context();
  require_streams(state, context->device, 1);
  *result = as_handle<Stream>(make_stream(state, context, priority, flags)->handle);
}

void synchronize(Runtime& state, Stream handle, int timeout_ms) {
  const auto stream = stream_of(state, handle);
  require_not_capturing(*stream);
  patiently(state, timeout_ms, kRtStreamSyncTimeout,
            [&] { state.device.scheduler.run(stream->queue); });
}

void require_destroyable(const StreamState& stream) {
  require_not_capturing(stream);
  refuse_unless(!is_default(stream), kRtParamInvalid, "the default stream belongs to its context");
  refuse_unless(stream.model.expired(), kRtStreamModel, "the stream is bound to a model");
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclrtCreateStream(Stream* stream) {
  return call("aclrtCreateStream", Needs::kContext,
              [&](Runtime& state) { put_stream(state, stream, 0, 0); });
}

ACL_EXPORT int aclrtCreateStreamWithConfig(Stream* stream, std::uint32_t priority,
                                           std::uint32_t flags) {
  return call("aclrtCreateStreamWithConfig", Needs::kContext, [&](Runtime& state) {
    constexpr std::uint32_t kKnown = kStreamFastLaunch | kStreamFastSync | kStreamPersistent |
                                     kStreamHuge | kStreamCpuSchedule | kStreamDeviceUseOnly;
    constexpr std::uint32_t kLowestPriority = 7;
    refuse_unless((flags & ~kKnown) == 0, kRtParamInvalid, "a flag is unknown");
    refuse_unless(priority <= kLowestPriority, kRtParamInvalid, "priorities go from 0 to 7");
    trace(state, "flags=%u", flags);
    put_stream(state, stream, priority, flags);
  });
}

ACL_EXPORT int aclrtDestroyStream(Stream handle) {
  return call("aclrtDestroyStream", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    require_destroyable(*stream);
    patiently(state, -1, kRtStreamSyncTimeout, [&] { state.device.scheduler.run(stream->queue); });
    remove_stream(state, *stream);
  });
}

// Queued work is lost.
ACL_EXPORT int aclrtDestroyStreamForce(Stream handle) {
  return call("aclrtDestroyStreamForce", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    require_destroyable(*stream);
    remove_stream(state, *stream);
  });
}

ACL_EXPORT int aclrtSynchronizeStream(Stream stream) {
  return call("aclrtSynchronizeStream", Needs::kContext,
              [&](Runtime& state) { synchronize(state, stream, -1); });
}

ACL_EXPORT int aclrtSynchronizeStreamWithTimeout(Stream stream, std::int32_t timeout_ms) {
  return call("aclrtSynchronizeStreamWithTimeout", Needs::kContext, [&](Runtime& state) {
    refuse_unless(timeout_ms >= -1, kRtParamInvalid, "the time is below -1");
    synchronize(state, stream, timeout_ms);
  });
}

// Work is always late: a query finds it undone, and the next query finds it done.
ACL_EXPORT int aclrtStreamQuery(Stream handle, StreamStatus* status) {
  return call("aclrtStreamQuery", Needs::kContext, [&](Runtime& state) {
    require_given(status, "the result");
    const auto stream = stream_of(state, handle);
    require_not_capturing(*stream);
    *status = stream->queue->queue.empty() ? kStreamComplete : kStreamNotReady;
    try {
      state.device.scheduler.run(stream->queue);
    } catch (const simulator::DeviceError& error) {
      if (error.status != simulator::Status::kBlocked) throw;
    }
  });
}

ACL_EXPORT int aclrtStreamGetId(Stream stream, std::int32_t* id) {
  return call("aclrtStreamGetId", Needs::kContext, [&](Runtime& state) {
    require_given(id, "the result");
    *id = stream_of(state, stream)->id;
  });
}

ACL_EXPORT int aclrtStreamGetPriority(Stream stream, std::uint32_t* priority) {
  return call("aclrtStreamGetPriority", Needs::kContext, [&](Runtime& state) {
    require_given(priority, "the result");
    *priority = stream_of(state, stream)->priority;
  });
}

ACL_EXPORT int aclrtStreamGetFlags(Stream stream, std::uint32_t* flags) {
  return call("aclrtStreamGetFlags", Needs::kContext, [&](Runtime& state) {
    require_given(flags, "the result");
    *flags = stream_of(state, stream)->flags;
  });
}

ACL_EXPORT int aclrtGetStreamAvailableNum(std::uint32_t* count) {
  return call("aclrtGetStreamAvailableNum", Needs::kContext, [&](Runtime& state) {
    require_given(count, "the result");
    const std::size_t used = n_streams(state, current_context()->device);
    const std::size_t limit = state.settings.stream_limit;
    *count = static_cast<std::uint32_t>(used < limit ? limit - used : 0);
  });
}

ACL_EXPORT int aclrtSetStreamAttribute(Stream stream, StreamAttribute attribute,
                                       StreamAttributeValue* value) {
  return call("aclrtSetStreamAttribute", Needs::kContext, [&](Runtime& state) {
    require_given(value, "the value");
    refuse_unless(attribute >= kStreamFailureMode && attribute <= kStreamPriority, kRtParamInvalid,
                  "no stream attribute has this number");
    stream_of(state, stream)->attributes[attribute] = *value;
  });
}

ACL_EXPORT int aclrtGetStreamAttribute(Stream stream, StreamAttribute attribute,
                                       StreamAttributeValue* value) {
  return call("aclrtGetStreamAttribute", Needs::kContext, [&](Runtime& state) {
    require_given(value, "the value");
    refuse_unless(attribute >= kStreamFailureMode && attribute <= kStreamPriority, kRtParamInvalid,
                  "no stream attribute has this number");
    *value = stream_of(state, stream)->attributes[attribute];
  });
}

// Whether overflows of floating-point numbers are noted. None ever happens here.
ACL_EXPORT int aclrtSetStreamOverflowSwitch(Stream handle, std::uint32_t flag) {
  return call("aclrtSetStreamOverflowSwitch", Needs::kContext, [&](Runtime& state) {
    const auto stream = stream_of(state, handle);
    require_not_capturing(*stream);
    stream->attributes[kStreamFloatOverflowCheck].overflow_switch = flag;
  });
}

ACL_EXPORT int aclrtGetStreamOverflowSwitch(Stream handle, std::uint32_t* flag) {
  return call("aclrtGetStreamOverflowSwitch", Needs::kContext, [&](Runtime& state) {
    require_given(flag, "the result");
    *flag = stream_of(state, handle)->attributes[kStreamFloatOverflowCheck].overflow_switch;
  });
}

ACL_EXPORT int aclrtResetOverflowStatus(Stream handle) {
  return call("aclrtResetOverflowStatus", Needs::kContext,
              [&](Runtime& state) { require_not_capturing(*stream_of(state, handle)); });
}

ACL_EXPORT int aclrtLaunchHostFunc(Stream handle, HostFunction function, void* user_data) {
  return call_on("aclrtLaunchHostFunc", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(function != nullptr, kRtParamInvalid, "the function is null");
    submit(state, stream, simulator::HostCall{function, user_data});
  });
}

// A callback runs as a host function does. No report is needed.
ACL_EXPORT int aclrtLaunchCallback(HostFunction function, void* user_data,
                                   CallbackBlockType block_type, Stream handle) {
  return call_on("aclrtLaunchCallback", handle, [&](Runtime& state, const auto& stream) {
    refuse_unless(function != nullptr, kRtParamInvalid, "the function is null");
    refuse_unless(block_type == kCallbackNoBlock || block_type == kCallbackBlock, kRtParamInvalid,
                  "no block type has this number");
    submit(state, stream, simulator::HostCall{function, user_data});
  });
}
