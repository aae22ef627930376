// Initialisation, errors, devices and contexts.
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <vector>

#include "models.hpp"

namespace simulated_ascend {
namespace {

thread_local std::string recent_text;  // since the last query
thread_local std::string handed_text;  // readable by the last caller of aclGetRecentErrMsg
thread_local int last_error = kSuccess;

constexpr std::size_t kMostRefusals = 1000;

struct Refusals {
  std::mutex mutex;
  std::vector<std::string> calls;
};

// Never destroyed: torch_npu calls while the process ends.
Refusals& refusals() {
  static auto* const all = new Refusals;
  return *all;
}

void require_device(const Runtime& state, std::int64_t device) {
  if (device >= 0 && device < state.settings.n_devices) return;
  refuse(kRtInvalidDeviceid, text("there is no device %lld", static_cast<long long>(device)));
}

std::shared_ptr<ContextState> make_context(Runtime& state, int device, bool is_primary) {
  require_streams(state, device, 1);
  auto context = state.contexts.add(std::make_shared<ContextState>());
  context->device = device;
  context->is_primary = is_primary;
  context->default_stream = make_stream(state, context, 0, 0);
  return context;
}

// Its streams and their queued work are removed with it.
void remove_context(Runtime& state, const std::shared_ptr<ContextState>& context) {
  const auto streams = state.streams;
  for (const auto& [handle, stream] : streams) {
    if (stream->context.lock() == context) remove_stream(state, *stream);
  }
  for (const auto& capture : state.captures.all()) {
    if (capture->context.lock() == context) capture->is_invalidated = true;
  }
  context->default_stream.reset();
  state.contexts.remove(context->handle);
}

void release_device(Runtime& state, int device) {
  const auto found = state.primary.find(device);
  if (found == state.primary.end()) return;
  const auto context = found->second;
  state.primary.erase(found);
  state.n_set[device] = 0;
  remove_context(state, context);
  state.device.scheduler.clear_fault();
}

void synchronize_device(Runtime& state, int timeout_ms) {
  const auto context = current_context();
  require_no_capture(state, *context);
  patiently(state, timeout_ms, kRtStreamSyncTimeout, [&] { state.device.scheduler.run_all(); });
}

}  // namespace

int tell(const char* function, int code, const std::string& why) noexcept {
  try {
    const char* const name = error_name(code);
    const std::string call = std::string(function) + ": " + std::to_string(code) + " " +
                             (name == nullptr ? "" : name) + ": " + why;
    recent_text += call + "\n";
    last_error = code;
    const std::lock_guard lock(refusals().mutex);
    if (refusals().calls.size() < kMostRefusals) refusals().calls.push_back(call);
  } catch (...) {
    recent_text.clear();  // no memory for text
  }
  return code;
}

std::optional<std::string> refusal(std::size_t index) {
  const std::lock_guard lock(refusals().mutex);
  if (index >= refusals().calls.size()) return std::nullopt;
  return refusals().calls[index];
}

void forget_refusals() {
  const std::lock_guard lock(refusals().mutex);
  refusals().calls.clear();
}

}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclInit(const char* configuration) {
  return call("aclInit", Needs::kNothing, [&](Runtime& state) {
    if (configuration != nullptr && *configuration != '\0') {
      refuse_unless(std::ifstream(configuration).good(), kAclInvalidFile,
                    "the configuration file cannot be read");
    }
    if (state.n_references++ != 0) refuse(kAclRepeatInitialize, "initialised before");
    state.was_finalized = false;
  });
}

namespace {

void finalize(Runtime& state) {
  state.n_references = 0;
  state.was_finalized = true;
  const auto primary = state.primary;
  for (const auto& entry : primary) release_device(state, entry.first);
}

}  // namespace

ACL_EXPORT int aclFinalize() {
  return call("aclFinalize", Needs::kNothing, [](Runtime& state) {
    refuse_unless(state.n_references != 0 || !state.was_finalized, kAclRepeatFinalize,
                  "finalised before");
    require(state, Needs::kInitialised);
    finalize(state);
  });
}

ACL_EXPORT int aclFinalizeReference(std::uint64_t* n_references) {
  return call("aclFinalizeReference", Needs::kInitialised, [&](Runtime& state) {
    if (--state.n_references == 0) finalize(state);
    if (n_references != nullptr) *n_references = state.n_references;
  });
}

// The thread's texts since the last query; null if there are none. Valid until the next call.
ACL_EXPORT const char* aclGetRecentErrMsg() {
  if (recent_text.empty()) return nullptr;
  handed_text = std::exchange(recent_text, std::string());
  return handed_text.c_str();
}

ACL_EXPORT int aclrtPeekAtLastError(LastErrorLevel) { return last_error; }

ACL_EXPORT int aclrtGetLastError(LastErrorLevel) { return std::exchange(last_error, kSuccess); }

ACL_EXPORT void aclAppLog(int, const char*, const char*, std::uint32_t, const char*, ...) {}

ACL_EXPORT int aclrtGetVersion(std::int32_t* major, std::int32_t* minor, std::int32_t* patch) {
  return call("aclrtGetVersion", Needs::kNothing, [&](Runtime&) {
    require_given(major, "the result");
    require_given(minor, "the result");
    require_given(patch, "the result");
    *major = 1;
    *minor = 17;
    *patch = 0;
  });
}

// Valid until the thread's next query.
ACL_EXPORT const char* aclrtGetSocName() {
  thread_local std::string name;
  const std::lock_guard lock(runtime().device.mutex);
  name = runtime().settings.soc_name;
  return name.c_str();
}

ACL_EXPORT int aclrtGetRunMode(RunMode* mode) {
  return call("aclrtGetRunMode", Needs::kInitialised, [&](Runtime&) {
    require_given(mode, "the result");
    *mode = kRunOnHost;
  });
}

ACL_EXPORT int aclrtGetDeviceCount(std::uint32_t* count) {
  return call("aclrtGetDeviceCount", Needs::kNothing, [&](Runtime& state) {
    require_given(count, "the result");
    *count = static_cast<std::uint32_t>(state.settings.n_devices);
  });
}

ACL_EXPORT int aclrtSetDevice(std::int32_t device) {
  return call("aclrtSetDevice", Needs::kInitialised, [&](Runtime& state) {
    require_device(state, device);
    auto& primary = state.primary[device];
    if (primary == nullptr) primary = make_context(state, device, /*is_primary=*/true);
    ++state.n_set[device];
    set_current_context(primary);
  });
}

ACL_EXPORT int aclrtResetDevice(std::int32_t device) {
  return call("aclrtResetDevice", Needs::kInitialised, [&](Runtime& state) {
    refuse_unless(state.n_set[device] > 0, kRtInvalidDeviceid, "the device was not set");
    if (--state.n_set[device] == 0) release_device(state, device);
  });
}

ACL_EXPORT int aclrtResetDeviceForce(std::int32_t device) {
  return call("aclrtResetDeviceForce", Needs::kInitialised, [&](Runtime& state) {
    require_device(state, device);
    release_device(state, device);
  });
}

ACL_EXPORT int aclrtGetDevice(std::int32_t* device) {
  return call("aclrtGetDevice", Needs::kContext, [&](Runtime&) {
    require_given(device, "the result");
    *device = current_context()->device;
  });
}

ACL_EXPORT int aclrtGetDeviceInfo(std::uint32_t device, DeviceAttribute attribute,
                                  std::int64_t* value) {
  constexpr std::int64_t kArchitecture = 2201, kCacheBytes = std::int64_t{192} << 20;
  return call("aclrtGetDeviceInfo", Needs::kNothing, [&](Runtime& state) {
    require_device(state, device);
    require_given(value, "the result");
    switch (attribute) {
      case kAicpuCoreCount:
        *value = 6;
        return;
      case kAicoreCoreCount:
      case kCubeCoreCount:
        *value = 24;
        return;
      case kVectorCoreCount:
        *value = 48;
        return;
      case kTotalGlobalMemoryBytes:
        *value = static_cast<std::int64_t>(state.device.memory.limit_bytes());
        return;
      case kL2CacheBytes:
        *value = kCacheBytes;
        return;
      case kNpuArchitecture:
        *value = kArchitecture;
        return;
    }
    refuse(kRtParamInvalid, "the simulated device does not know this attribute");
  });
}

ACL_EXPORT int aclGetDeviceCapability(std::uint32_t device, int information, std::int64_t* value) {
  constexpr DeviceAttribute kSame[] = {kAicoreCoreCount, kVectorCoreCount, kL2CacheBytes};
  if (information < 0 || information > 2) {
    return tell("aclGetDeviceCapability", kAclInvalidParam, "no such information");
  }
  return aclrtGetDeviceInfo(device, kSame[information], value);
}

ACL_EXPORT int aclrtDeviceCanAccessPeer(std::int32_t* can, std::int32_t device, std::int32_t peer) {
  return call("aclrtDeviceCanAccessPeer", Needs::kNothing, [&](Runtime& state) {
    require_given(can, "the result");
    require_device(state, device);
    require_device(state, peer);
    *can = device != peer ? 1 : 0;
  });
}

ACL_EXPORT int aclrtSynchronizeDevice() {
  return call("aclrtSynchronizeDevice", Needs::kContext,
              [](Runtime& state) { synchronize_device(state, -1); });
}

ACL_EXPORT int aclrtSynchronizeDeviceWithTimeout(std::int32_t timeout_ms) {
  return call("aclrtSynchronizeDeviceWithTimeout", Needs::kContext, [&](Runtime& state) {
    refuse_unless(timeout_ms >= -1, kRtParamInvalid, "the time is below -1");
    synchronize_device(state, timeout_ms);
  });
}

ACL_EXPORT int aclrtCreateContext(Context* context, std::int32_t device) {
  return call("aclrtCreateContext", Needs::kInitialised, [&](Runtime& state) {
    require_given(context, "the result");
    require_device(state, device);
    const auto made = make_context(state, device, /*is_primary=*/false);
    set_current_context(made);
    *context = as_handle<Context>(made->handle);
  });
}

ACL_EXPORT int aclrtDestroyContext(Context context) {
  return call("aclrtDestroyContext", Needs::kInitialised, [&](Runtime& state) {
    const auto found = state.contexts.find(as_number(context));
    refuse_unless(found != nullptr, kRtContextNull, "no context has this handle");
    refuse_unless(!found->is_primary, kRtParamInvalid,
                  "a device's own context goes with aclrtResetDevice");
    require_no_capture(state, *found);
    remove_context(state, found);
  });
}

ACL_EXPORT int aclrtSetCurrentContext(Context context) {
  return call("aclrtSetCurrentContext", Needs::kInitialised, [&](Runtime& state) {
    const auto found = state.contexts.find(as_number(context));
    refuse_unless(found != nullptr, kRtContextNull, "no context has this handle");
    set_current_context(found);
  });
}

ACL_EXPORT int aclrtGetCurrentContext(Context* context) {
  return call("aclrtGetCurrentContext", Needs::kContext, [&](Runtime&) {
    require_given(context, "the result");
    *context = as_handle<Context>(current_context()->handle);
  });
}

ACL_EXPORT int aclrtCtxGetCurrentDefaultStream(Stream* stream) {
  return call("aclrtCtxGetCurrentDefaultStream", Needs::kContext, [&](Runtime&) {
    require_given(stream, "the result");
    *stream = as_handle<Stream>(current_context()->default_stream->handle);
  });
}
