// The simulated Ascend runtime: the state of the process, and common parts of all calls of the ABI.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "objects.hpp"

#define ACL_EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated_ascend {

// Thrown to refuse a call: the returned code, and the reason, for aclGetRecentErrMsg.
struct Refusal {
  int code;
  std::string why;
};

[[noreturn]] inline void refuse(int code, const std::string& why) { throw Refusal{code, why}; }

inline void refuse_unless(bool holds, int code, const char* why) {
  if (!holds) refuse(code, why);
}

// 107000 unless the caller gave the pointer.
inline void require_given(const void* pointer, const char* what) {
  if (pointer == nullptr) refuse(kRtParamInvalid, std::string(what) + " is null");
}

// The features and resources of a kind of chip, as far as documented; other chips count as A2.
struct Chip {
  bool captures = true;
  bool tells_tasks = true;  // enumerates tasks, changes them, has conditional ones
  std::size_t n_streams = 1984;
  std::size_t n_events = 65536;  // of the pool; that of 910 and 310B is not documented
  bool copies_by_offset = true;  // RT_FEATURE_TASK_MEMCPY_D2D_BY_OFFSET of hicann/runtime
};

Chip chip_of(const std::string& soc_name);

// Settings of a test; the rest of the state follows from calls.
struct Settings {
  int n_devices = 1;
  std::size_t stream_limit = 1984;
  int no_stream_code = kRtNoStreamResource;
  std::string soc_name = "Ascend910B1";
  Chip chip;
  std::size_t event_limit = 65536;
  std::size_t update_limit = std::size_t{1} << 20;  // tasks of task groups under update
  std::size_t stream_depth = 2048;  // tasks of one stream of a model, before it needs another
  std::size_t bound_depth = 2013;   // tasks of a stream that is bound to a model: A2, A3
  bool software_sq = true;
  int patience_ms = 10000;          // duration of a wait for work that is never issued
  int destroy_polls = 10000;        // of one millisecond
  std::size_t loop_limit = 100000;  // rounds of a conditional task, before they are a fault
  bool waits_take_time = true;      // a millisecond that a wait lasts; else it is only counted
  bool first_stream_first = false;
  bool tells_all_tasks = true;
  bool keeps_addresses = true;   // of a task's arguments in device memory
  bool copies_by_offset = true;  // the firmware: TS_FEATURE_D2D_ADDR_ASYNC of hicann/runtime
  bool locks_registered = true;  // else the driver only notes a range as pinned
  std::string caller;  // a part of the file name of the library whose calls also count separately
};

struct OfflineState;

// One in the process, never destroyed: clients may call while they exit.
struct Runtime {
  simulator::Device device;
  ArgumentPool arguments{device.memory};
  Settings settings;
  std::uint64_t n_references = 0;  // of aclInit
  bool was_finalized = false;
  std::map<int, std::shared_ptr<ContextState>> primary;  // by device
  std::map<int, int> n_set;                              // aclrtSetDevice less aclrtResetDevice
  simulator::Registry<ContextState> contexts;
  std::map<std::uint64_t, std::shared_ptr<StreamState>> streams;
  simulator::Registry<EventState> events;
  std::size_t n_pooled_events = 0;
  simulator::Registry<BinaryState> binaries;
  simulator::Registry<FunctionState> functions;
  simulator::Registry<ImageState> images;
  simulator::Registry<Capture> captures;  // active
  simulator::Registry<ModelState> models;
  simulator::Registry<Task> tasks;
  simulator::Registry<ConditionState> conditions;
  std::map<std::uint64_t, std::size_t> registered_host;  // address, bytes
  std::set<int> stream_ids;
  std::shared_ptr<OfflineState> offline;
  std::uint32_t next_model_id = 1, next_event_id = 0;
  std::uint64_t waited_ms = 0;  // since the last reset
};

Runtime& runtime();

// The calling thread's context; null before any was set, or after it was destroyed.
std::shared_ptr<ContextState> current_context();
void set_current_context(const std::shared_ptr<ContextState>& context);

// Requirements of a function at its call.
enum class Needs { kNothing, kInitialised, kContext };

int code_of(simulator::Status status);
// Keeps the text for aclGetRecentErrMsg and the code for aclrtGetLastError, of this thread.
int tell(const char* function, int code, const std::string& why) noexcept;
// The first calls, of any thread, that failed since they were forgotten, such as "aclrtMalloc:
// 107030 ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT: ..."; none beyond the end. Thread: any.
std::optional<std::string> refusal(std::size_t index);
void forget_refusals();
// Returns the code of the current exception, after noting it.
int tell_exception(const char* function) noexcept;
void require(Runtime& state, Needs needs);

// Counts a call; returns the code that a test has it fail with. If callers are distinguished, a
// call by the given library also counts under "FUNCTION by LIBRARY".
std::optional<int> note(Runtime& state, const char* function);

// Counts the call, fails it if a test says so, and refuses it inside work, before aclInit or
// without a context. `body` runs under the device's mutex. Never throws.
template <class Body>
int call(const char* function, Needs needs, const Body& body) noexcept {
  if (simulator::is_inside_work()) return tell(function, kAclInternalError, "called by a kernel");
  try {
    Runtime& state = runtime();
    const std::lock_guard lock(state.device.mutex);
    if (const auto code = note(state, function)) {
      return tell(function, *code, "a failure that the test planned");
    }
    require(state, needs);
    body(state);
    return kSuccess;
  } catch (...) {
    return tell_exception(function);
  }
}

template <class... Arguments>
std::string text(const char* format, Arguments... arguments) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, arguments...);
  return buffer;
}

// Adds details of this call to the trace that tests read.
template <class... Arguments>
void trace(Runtime& state, const char* format, Arguments... arguments) {
  state.device.ledger.describe(text(format, arguments...));
}

// Lets a millisecond pass, in which other threads may call.
void let_time_pass(Runtime& state);

// Repeats `wait` until it does not return kBlocked. Errors: `code` after this many milliseconds;
// below 0: after the set patience.
template <class Wait>
void patiently(Runtime& state, int timeout_ms, int code, const Wait& wait) {
  const int limit_ms = timeout_ms < 0 ? state.settings.patience_ms : timeout_ms;
  for (int waited_ms = 0;; ++waited_ms) {
    try {
      wait();
      return;
    } catch (const simulator::DeviceError& error) {
      if (error.status != simulator::Status::kBlocked) throw;
    }
    if (waited_ms >= limit_ms) refuse(code, "the work waits for something that does not happen");
    let_time_pass(state);
  }
}

template <class Handle>
Handle as_handle(std::uint64_t number) {
  return reinterpret_cast<Handle>(number);
}

template <class Handle>
std::uint64_t as_number(Handle handle) {
  return reinterpret_cast<std::uint64_t>(handle);
}

// The stream; null: the current context's default stream. Errors: 107003 for a stream that is
// unknown or of another context.
std::shared_ptr<StreamState> stream_of(Runtime& state, Stream stream);
bool is_default(const StreamState& stream);
// Errors: 107000 for an unknown event.
std::shared_ptr<EventState> event_of(Runtime& state, Event event);
// Errors: 207008, or the code that is set, when the device has no more streams.
std::shared_ptr<StreamState> make_stream(Runtime& state,
                                         const std::shared_ptr<ContextState>& context,
                                         std::uint32_t priority, std::uint32_t flags);
void remove_stream(Runtime& state, StreamState& stream);
// How many of a device's streams are in use; models count theirs where the firmware binds them.
std::size_t n_streams(const Runtime& state, int device);
void require_streams(const Runtime& state, int device, std::size_t n_more);

// Throws 107027 if any stream of the context captures.
void require_no_capture(const Runtime& state, const ContextState& context);
// 207000 where the chip captures no models, or reports no tasks. The runtime's code is not
// documented: this is the code of other missing features.
void require_capturing_chip(const Runtime& state);
void require_telling_chip(const Runtime& state);
// The mode rule: `code` (107030 or 107041) where captures forbid this thread an unsafe call.
void require_safe(const Runtime& state, int code);
// 107027 if the stream captures.
void require_not_capturing(const StreamState& stream);
// 107028 if the event was last recorded in a capture.
void require_not_captured(const EventState& event);

// Restores the initial state; primary contexts and their handles stay. False while work runs.
bool reset(Runtime& state);
// Gives the calling thread the capture mode that new threads have.
void reset_thread_mode();

}  // namespace simulated_ascend
