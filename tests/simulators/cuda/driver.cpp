#include "driver.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

namespace simulated_cuda {

using simulator::Status;

DriverState& driver() {
  static auto* const state = new DriverState;
  return *state;
}

Context& current_context() {
  thread_local Context current = nullptr;
  return current;
}

Context primary_context() {
  static const std::uint64_t handle = simulator::new_handle();
  return as_handle<Context>(handle);
}

Result code_of(Status status) {
  switch (status) {
    case Status::kInvalidValue:
      return kInvalidValue;
    case Status::kInvalidHandle:
      return kInvalidHandle;
    case Status::kOutOfMemory:
      return kOutOfMemory;
    case Status::kAlreadyRegistered:
      return kHostAlreadyRegistered;
    case Status::kNotRegistered:
      return kHostNotRegistered;
    case Status::kNotReady:
      return kNotReady;
    case Status::kIllegalState:
      return kIllegalState;
    case Status::kIllegalAddress:
      return kIllegalAddress;
    case Status::kLaunchFailed:
      return kLaunchFailed;
    case Status::kOverlap:
    case Status::kBlocked:
      return kUnknown;  // not raised by calls of this driver
    case Status::kCaptureUnsupported:
      return kStreamCaptureUnsupported;
    case Status::kCaptureInvalidated:
      return kStreamCaptureInvalidated;
    case Status::kCaptureMerge:
      return kStreamCaptureMerge;
    case Status::kCaptureUnmatched:
      return kStreamCaptureUnmatched;
    case Status::kCaptureUnjoined:
      return kStreamCaptureUnjoined;
    case Status::kCaptureIsolation:
      return kStreamCaptureIsolation;
    case Status::kCaptureImplicit:
      return kStreamCaptureImplicit;
    case Status::kCapturedEvent:
      return kCapturedEvent;
    case Status::kCaptureWrongThread:
      return kStreamCaptureWrongThread;
  }
  return kUnknown;
}

namespace {

struct ErrorText {
  int code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in this state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kLossyQuery, "CUDA_ERROR_LOSSY_QUERY", "operation would lose information in the result"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kStreamCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kStreamCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kStreamCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {kStreamCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {kStreamCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kStreamCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {kStreamCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {kGraphExecUpdateFailure, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed because it included changes which violated constraints"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

Result find_text(Result error, const char** result, const char* ErrorText::* member) {
  if (result == nullptr) return kInvalidValue;
  *result = nullptr;
  for (const ErrorText& known : kErrors) {
    if (known.code == error) *result = known.*member;
  }
  return *result == nullptr ? kInvalidValue : kSuccess;
}

void require_device(Device ordinal) {
  simulator::require(ordinal >= 0 && ordinal < driver().n_devices, Status::kInvalidValue);
}

}  // namespace

Result get_error_name(Result error, const char** name) {
  return find_text(error, name, &ErrorText::name);
}

Result get_error_string(Result error, const char** text) {
  return find_text(error, text, &ErrorText::text);
}

Result init(unsigned int flags) {
  Result result = kSuccess;
  const Result refused = call("cuInit", Needs::kNothing, [&](auto&) {
    simulator::require(flags == 0, Status::kInvalidValue);
    if (driver().n_devices == 0) result = kNoDevice;
    driver().initialised = driver().n_devices != 0;
  });
  return refused != kSuccess ? refused : result;
}

Result driver_get_version(int* version) {
  return call("cuDriverGetVersion", Needs::kNothing, [&](auto&) {
    require_given(version);
    *version = driver().version;
  });
}

Result device_get(Device* device, int ordinal) {
  const Result result = call("cuDeviceGet", Needs::kDriver, [&](auto&) {
    require_given(device);
    *device = ordinal;
  });
  if (result != kSuccess) return result;
  return ordinal >= 0 && ordinal < driver().n_devices ? kSuccess : kInvalidDevice;
}

Result device_get_count(int* count) {
  return call("cuDeviceGetCount", Needs::kDriver, [&](auto&) {
    require_given(count);
    *count = driver().n_devices;
  });
}

Result device_get_name(char* name, int length, Device device) {
  return call("cuDeviceGetName", Needs::kDriver, [&](auto&) {
    require_device(device);
    simulator::require(name != nullptr && length > 0, Status::kInvalidValue);
    std::strncpy(name, "Simulated device", static_cast<std::size_t>(length));
    name[length - 1] = '\0';
  });
}

Result device_get_attribute(int* value, int attribute, Device device) {
  struct Known {
    int attribute, value;
  };
  constexpr Known kKnown[] = {
      {1, 1024},  // threads in a block
      {10, 32},   // threads in a warp
      {16, 132},  // multiprocessors
      {41, 1},    // unified addressing
      {75, 9},    // compute capability, major
      {76, 0},    // and minor
      {102, 1},   // virtual memory management
  };
  return call("cuDeviceGetAttribute", Needs::kDriver, [&](auto&) {
    require_device(device);
    require_given(value);
    const auto* const found =
        std::find_if(std::begin(kKnown), std::end(kKnown),
                     [&](const Known& known) { return known.attribute == attribute; });
    simulator::require(found != std::end(kKnown), Status::kInvalidValue);
    *value = found->value;
  });
}

Result device_total_mem(std::size_t* n_bytes, Device device) {
  return call("cuDeviceTotalMem", Needs::kDriver, [&](simulator::Device& simulated) {
    require_device(device);
    require_given(n_bytes);
    *n_bytes = simulated.memory.limit_bytes();
  });
}

Result primary_context_retain(Context* context, Device device) {
  return call("cuDevicePrimaryCtxRetain", Needs::kDriver, [&](auto&) {
    require_device(device);
    require_given(context);
    ++driver().n_retained;
    *context = primary_context();
  });
}

Result primary_context_release(Device device) {
  return call("cuDevicePrimaryCtxRelease", Needs::kDriver, [&](auto&) {
    require_device(device);
    simulator::require(driver().n_retained > 0, Status::kInvalidValue);
    --driver().n_retained;
  });
}

Result context_get_current(Context* context) {
  return call("cuCtxGetCurrent", Needs::kDriver, [&](auto&) {
    require_given(context);
    *context = current_context();
  });
}

Result context_set_current(Context context) {
  const Result result = call("cuCtxSetCurrent", Needs::kDriver, [](auto&) {});
  if (result != kSuccess) return result;
  if (context != nullptr && context != primary_context()) return kInvalidContext;
  current_context() = context;
  return kSuccess;
}

Result context_get_device(Device* device) {
  return call("cuCtxGetDevice", Needs::kContext, [&](auto&) {
    require_given(device);
    *device = 0;
  });
}

Result context_synchronize() {
  return call("cuCtxSynchronize", Needs::kContext, [](simulator::Device& device) {
    device.captures.require_none();
    device.scheduler.run_all();
  });
}

}  // namespace simulated_cuda
