#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <mutex>

#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kOldestVersion = 12040;  // cuFuncGetParamInfo

// cuGetProcAddress_v2.
using GetFunction = Result (*)(const char* symbol, void** function, int version,
                               std::uint64_t flags, int* status);

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

[[noreturn]] void lacks(GetFunction get_function, const char* symbol, int wanted) {
  std::string message = std::string(kLibrary) + " has no " + symbol + " (CUDA " +
                        version_text(wanted) + "); offload needs a driver of CUDA " +
                        version_text(kOldestVersion) + " or later";
  Result (*get_version)(int*) = nullptr;
  void* found = nullptr;
  int version = 0;
  if (get_function("cuDriverGetVersion", &found, 2020, 0, nullptr) == kSuccess && found) {
    get_version = reinterpret_cast<Result (*)(int*)>(found);
    if (get_version(&version) == kSuccess) message += ", this one is of " + version_text(version);
  }
  throw BackendUnavailable(message);
}

void* resolve(GetFunction get_function, const char* symbol, int version) {
  void* found = nullptr;
  int status = 0;
  const Result result = get_function(symbol, &found, version, 0, &status);
  if (result != kSuccess || found == nullptr) lacks(get_function, symbol, version);
  return found;
}

}  // namespace

void Driver::open() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    throw BackendUnavailable(std::string("the CUDA driver's library cannot be opened: ") +
                             (reason != nullptr ? reason : kLibrary) +
                             "; install an NVIDIA driver of CUDA " + version_text(kOldestVersion) +
                             " or later");
  }
  const auto get_function = reinterpret_cast<GetFunction>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_function == nullptr) {
    throw BackendUnavailable(std::string(kLibrary) +
                             " has no cuGetProcAddress_v2; offload needs a driver of CUDA " +
                             version_text(kOldestVersion) + " or later");
  }
#define OFFLOAD_RESOLVE(name, symbol, version, signature) \
  name = reinterpret_cast<decltype(name)>(resolve(get_function, symbol, version));
  OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_RESOLVE)
#undef OFFLOAD_RESOLVE
  const Result result = init(0);
  if (result != kSuccess) {
    throw BackendUnavailable("the CUDA driver does not start: " + describe(result));
  }
}

const Driver& Driver::get() {
  static std::mutex mutex;
  static const Driver* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) {
    static Driver driver;
    driver.open();
    opened = &driver;
  }
  return *opened;
}

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  const std::string number = std::to_string(static_cast<int>(result));
  if (get_error_name(result, &name) != kSuccess || name == nullptr) return "CUDA error " + number;
  if (get_error_string(result, &text) != kSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

bool is_fault(Result code) {
  switch (code) {
    case kDeinitialized:
    case kUncorrectableEcc:
    case kUncorrectableLink:
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssertFailed:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidProgramCounter:
    case kLaunchFailed:
    case kTensorMemoryLeak:
    case kMpsClientTerminated:
    case kExternalDevice:
      return true;
    default:
      return false;
  }
}

void Driver::fail(Result result, const std::string& what) const {
  if (result == kOutOfMemory) throw OutOfMemory(what + ": " + describe(result));
  throw ExecutionError(
      what + ": " + describe(result) +
      (is_fault(result) ? "; a device that has faulted can be used again in a new process" : ""));
}

void Driver::fail_memory(Result result, std::size_t n_bytes, const char* what) const {
  if (result != kOutOfMemory) fail(result, what);
  fail(result, std::string(what) + ", " + std::to_string(n_bytes) + " bytes");
}

PrimaryContext::PrimaryContext(const Driver& driver, int device) : driver_(driver) {
  int count = 0;
  driver_.check(driver_.device_get_count(&count), "counting devices");
  if (device < 0 || device >= count) {
    throw BackendUnavailable("cuda:" + std::to_string(device) + " does not exist: there are " +
                             std::to_string(count) + " devices");
  }
  driver_.check(driver_.device_get(&device_, device), "finding the device");
  int supported = 0;
  driver_.check(
      driver_.device_get_attribute(&supported, kVirtualMemoryManagementSupported, device_),
      "asking for virtual memory management");
  if (supported == 0) {
    throw BackendUnavailable("cuda:" + std::to_string(device) +
                             " has no virtual memory management, which offload needs");
  }
  driver_.check(driver_.primary_context_retain(&context_, device_),
                "retaining the device's primary context");
}

PrimaryContext::~PrimaryContext() { driver_.primary_context_release(device_); }

void refuse_capturing(const Driver& driver, Stream stream, const char* which) {
  CaptureStatus status = kCaptureNone;
  driver.check(driver.stream_is_capturing(stream, &status), "asking whether the stream captures");
  if (status == kCaptureNone) return;
  throw ExecutionError(
      std::string(which) +
      " is being captured into another CUDA graph, where the addresses of an execution cannot be "
      "patched: execute outside the capture, or capture the model itself");
}

OwnStream::OwnStream(const Driver& driver) : driver_(driver) {
  driver_.check(driver_.stream_create(&stream_, kStreamNonBlocking), "making a stream");
}

OwnStream::~OwnStream() { driver_.stream_destroy(stream_); }

OrderEvent::OrderEvent(const Driver& driver) : driver_(driver) {
  driver_.check(driver_.event_create(&event_, kEventWithoutTimes), "making an event");
}

OrderEvent::~OrderEvent() { driver_.event_destroy(event_); }

}  // namespace offload::cuda
