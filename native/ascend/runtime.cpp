#include "ascend/runtime.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <type_traits>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

constexpr const char* kLibraries[] = {"libascendcl.so", "libacl_rt.so", "libacl_mdl.so",
                                      "libnnopbase.so"};

constexpr const char* kCapabilityNames[kCapabilities] = {
    "core",           "kernel_launch",      "capture",
    "exchange_mode",  "host_args",          "memcpy_offset",
    "explicit_build", "task_params",        "task_update",
    "offline_model",  "finalize_reference", "stream_count",
};

constexpr const char* kForked =
    "this process was forked from one that had opened the Ascend runtime, which does not work in "
    "the child: load the program in a newly started process (multiprocessing's \"spawn\")";

// RelaxedCapture permits these where the runtime supports it.
constexpr const char* kOtherCapture =
    "; a capture that is under way forbids copies and waits of this thread (in GLOBAL mode those "
    "of "
    "every thread, in RELAXED mode none): wait until it has ended, or begin it in RELAXED mode "
    "(capture_error_mode=\"relaxed\")";

// Stands for a function of the runtime in a forked child.
template <class Function>
struct Forked;
template <class Result, class... Arguments>
struct Forked<Result (*)(Arguments...)> {
  static Result call(Arguments...) {
    if constexpr (std::is_same_v<Result, Error>) {
      return kAclFailure;
    } else {
      return Result{};
    }
  }
};

std::atomic<std::uint64_t> n_references{0};
std::atomic<int> n_counted_streams{0};

struct Libraries {
  std::vector<void*> handles;
  std::string names;   // of the opened libraries
  std::string reason;  // why the first was not opened
};

Libraries open_libraries() {
  Libraries found;
  for (const char* const name : kLibraries) {
    void* const library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (library != nullptr) {
      found.handles.push_back(library);
      found.names += (found.names.empty() ? "" : ", ") + std::string(name);
    } else if (found.reason.empty()) {
      const char* const reason = dlerror();
      found.reason = reason != nullptr ? reason : name;
    }
  }
  return found;
}

void* resolve(const Libraries& libraries, const char* symbol) {
  for (void* const library : libraries.handles) {
    if (void* const found = dlsym(library, symbol)) return found;
  }
  return nullptr;
}

bool is_digit(char one) { return one >= '0' && one <= '9'; }

// Captures accept only events of aclrtCreateEventExWithFlag, which are unlimited; it refuses
// external events (107000), and aclrtResetEvent refuses its events (207000). External events come
// from the pool.
Error create(const Runtime& runtime, std::uint32_t flags, Event& event) {
  const bool is_external = (flags & kEventExternal) != 0;
  return is_external ? runtime.create_event(&event, flags) : runtime.create_event_ex(&event, flags);
}

}  // namespace

std::optional<int> stream_budget(std::string_view soc_name) {
  const auto begins = [&](std::string_view start) {
    return soc_name.substr(0, start.size()) == start;
  };
  if (begins("Ascend310B")) return 512;
  if (begins("Ascend310P")) return 1024;
  if (begins("Ascend950") || begins("Ascend910_93")) return 1984;
  // Ascend910B without a number is a 910, as Ascend910A is.
  constexpr std::string_view kA2 = "Ascend910B";
  if (begins(kA2) && soc_name.size() > kA2.size() && is_digit(soc_name[kA2.size()])) return 1984;
  if (begins("Ascend910")) return 2048;
  return std::nullopt;
}

void Runtime::open() {
  const Libraries libraries = open_libraries();
  if (libraries.handles.empty()) {
    throw BackendUnavailable(
        "the Ascend runtime's library cannot be opened: " + libraries.reason +
        "; nor is there libacl_rt.so, libacl_mdl.so or libnnopbase.so: install CANN "
        "8.1 or later and source its set_env.sh");
  }
  for (std::string& symbols : missing_) symbols.clear();
#define OFFLOAD_RESOLVE(name, symbol, capability, result, signature)   \
  name = reinterpret_cast<decltype(name)>(resolve(libraries, symbol)); \
  if (name == nullptr) {                                               \
    std::string& symbols = missing_[index_of(Capability::capability)]; \
    symbols += (symbols.empty() ? "" : ", ") + std::string(symbol);    \
  }
  OFFLOAD_ACL_FUNCTIONS(OFFLOAD_RESOLVE)
#undef OFFLOAD_RESOLVE
  const std::string& core = missing_[index_of(Capability::kCore)];
  if (!core.empty()) {
    throw BackendUnavailable(
        "the Ascend runtime has no " + core + " in " + libraries.names +
        (libraries.reason.empty() ? "" : " (not opened: " + libraries.reason + ")") +
        "; offload needs a complete installation of CANN 8.1 or later");
  }
}

// Writes only pointers and a flag: it runs directly after the fork.
void Runtime::end_in_child() noexcept {
  is_forked_ = true;
#define OFFLOAD_FORKED(name, symbol, capability, result, signature) \
  if (name != nullptr) name = Forked<decltype(name)>::call;
  OFFLOAD_ACL_FUNCTIONS(OFFLOAD_FORKED)
#undef OFFLOAD_FORKED
}

void Runtime::initialize() const {
  const Error error = init(nullptr);
  if (error != kSuccess && error != kAclRepeatInitialize) {
    throw BackendUnavailable("the Ascend runtime does not start: " + describe(error));
  }
  ++n_references;
}

void Runtime::release() const noexcept {
  if (!has(Capability::kFinalizeReference)) return;
  for (std::uint64_t left = n_references.exchange(0); left > 0; --left) {
    std::uint64_t count = 0;
    if (finalize_reference(&count) != kSuccess) return;
  }
}

const Runtime& Runtime::get() {
  static std::mutex mutex;
  static Runtime* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) {
    static Runtime runtime;
    runtime.open();
    runtime.initialize();
    opened = &runtime;
    pthread_atfork(nullptr, nullptr, [] { opened->end_in_child(); });
  }
  if (opened->is_forked()) throw BackendUnavailable(kForked);
  return *opened;
}

void Runtime::require(Capability capability, const char* what) const {
  const std::string& symbols = missing_[index_of(capability)];
  if (symbols.empty()) return;
  throw BackendUnavailable(std::string(what) + " needs " + symbols +
                           ", which this Ascend runtime lacks: install a newer CANN");
}

std::vector<std::pair<std::string, bool>> Runtime::capabilities() const {
  std::vector<std::pair<std::string, bool>> found;
  for (int index = 1; index < kCapabilities; ++index) {
    found.emplace_back(kCapabilityNames[index], has(static_cast<Capability>(index)));
  }
  return found;
}

std::string Runtime::describe(Error error) const {
  if (is_forked_) return kForked;
  const char* const name = error_name(error);
  std::string text = std::to_string(static_cast<int>(error));
  if (name != nullptr) text += " " + std::string(name);
  const char* const message = get_recent_error_message();
  if (message != nullptr && *message != '\0') text += " (" + std::string(message) + ")";
  return text;
}

Context Runtime::current_context() const {
  Context context = nullptr;
  if (get_current_context(&context) == kSuccess) return context;
  get_recent_error_message();  // clears it
  return nullptr;
}

void Runtime::fail(Error error, const std::string& what) const {
  std::string text = what + ": " + describe(error);
  if (error == kRtCaptureModeNotSupport || error == kRtCaptureModeBlockAsync) text += kOtherCapture;
  if (error == kRtMemoryAllocation || error == kRtDeviceOom) throw OutOfMemory(text);
  if (error == kRtNoStreamResource || error == kRtResourceAllocFail) throw OutOfStreams(text);
  throw ExecutionError(text);
}

void Runtime::check_memory(Error error, std::size_t n_bytes, const char* what) const {
  if (error == kSuccess) return;
  const bool ran_out =
      error == kRtMemoryAllocation || error == kRtDeviceOom || error == kAclBadAlloc;
  fail(error, ran_out ? std::string(what) + ", " + std::to_string(n_bytes) + " bytes" : what);
}

Device::Device(const Runtime& runtime, int index) : index_(index) {
  std::uint32_t count = 0;
  runtime.check(runtime.get_device_count(&count), "counting devices");
  if (index < 0 || static_cast<std::uint32_t>(index) >= count) {
    throw BackendUnavailable("npu:" + std::to_string(index) + " does not exist: there are " +
                             std::to_string(count) + " devices");
  }
  const Context before = runtime.current_context();
  runtime.check(runtime.set_device(index), "choosing the device");
  const Error error = runtime.get_current_context(&context_);
  if (before != nullptr && before != context_) runtime.set_current_context(before);
  runtime.check(error, "finding the device's context");
}

DeviceMemory::DeviceMemory(const Runtime& runtime, std::size_t n_bytes, const char* what)
    : runtime_(runtime), n_bytes_(n_bytes) {
  if (n_bytes == 0) return;
  runtime_.check_memory(runtime_.malloc(&address_, n_bytes, kMallocHugeFirst), n_bytes, what);
}

DeviceMemory::~DeviceMemory() {
  if (address_ != nullptr) runtime_.free(address_);
}

OwnStream::OwnStream(const Runtime& runtime, std::uint32_t flags) : runtime_(runtime) {
  const Error error = runtime_.create_stream(&stream_, 0, flags);
  if (error == kRtNoStreamResource || error == kRtResourceAllocFail) {
    std::string what = "making a stream: offload holds " + std::to_string(CountedStreams::count());
    const char* const soc_name = runtime_.get_soc_name();
    if (const auto budget = stream_budget(soc_name == nullptr ? "" : soc_name)) {
      what +=
          ", and a device has " + std::to_string(*budget) + " (" + soc_name + ") for all its users";
    }
    std::uint32_t n_available = 0;
    if (runtime_.has(Capability::kStreamCount) &&
        runtime_.get_available_streams(&n_available) == kSuccess) {
      what += ", " + std::to_string(n_available) + " of them free";
    }
    runtime_.fail(
        error,
        what + "; each loaded program takes some (Executable.explain says how many): close some");
  }
  runtime_.check(error, "making a stream");
}

// On a failed device only by force.
OwnStream::~OwnStream() {
  if (runtime_.destroy_stream(stream_) != kSuccess) runtime_.destroy_stream_force(stream_);
}

CountedStreams::CountedStreams(int n_streams) : n_streams_(n_streams) {
  n_counted_streams += n_streams_;
}

CountedStreams::~CountedStreams() { n_counted_streams -= n_streams_; }

int CountedStreams::count() { return n_counted_streams; }

OrderEvent::OrderEvent(const Runtime& runtime, std::uint32_t flags) : runtime_(runtime) {
  runtime_.check(create(runtime_, flags, event_), "making an event");
}

OrderEvent::~OrderEvent() { runtime_.destroy_event(event_); }

bool makes_events(const Runtime& runtime, std::uint32_t flags, const char* what) {
  Event event = nullptr;
  const Error error = create(runtime, flags, event);
  if (error == kRtParamInvalid || error == kRtFeatureNotSupport) return false;
  runtime.check(error, what);
  runtime.destroy_event(event);
  return true;
}

}  // namespace offload::acl
