#include "runtime.hpp"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "models.hpp"

namespace simulated_ascend {

using simulator::DeviceError;
using simulator::Status;

Runtime& runtime() {
  static auto* const state = new Runtime;
  return *state;
}

namespace {

thread_local std::uint64_t thread_context = 0;

}  // namespace

std::shared_ptr<ContextState> current_context() { return runtime().contexts.find(thread_context); }

void set_current_context(const std::shared_ptr<ContextState>& context) {
  thread_context = context == nullptr ? 0 : context->handle;
}

void require(Runtime& state, Needs needs) {
  if (needs == Needs::kNothing) return;
  refuse_unless(state.n_references != 0, kAclUninitialize,
                state.was_finalized ? "aclFinalize was called" : "aclInit was not called");
  if (needs == Needs::kContext && current_context() == nullptr) {
    refuse(kRtContextNull,
           "this thread has no context: call aclrtSetDevice or "
           "aclrtSetCurrentContext on it");
  }
}

std::shared_ptr<StreamState> stream_of(Runtime& state, Stream stream) {
  const auto context = current_context();
  if (stream == nullptr) return context->default_stream;
  const auto found = state.streams.find(as_number(stream));
  refuse_unless(found != state.streams.end(), kRtStreamContext, "no stream has this handle");
  refuse_unless(found->second->context.lock() == context, kRtStreamContext,
                "the stream is of another context than the thread's");
  return found->second;
}

bool is_default(const StreamState& stream) {
  const auto context = stream.context.lock();
  return context != nullptr && context->default_stream.get() == &stream;
}

std::shared_ptr<EventState> event_of(Runtime& state, Event event) {
  const auto found = state.events.find(as_number(event));
  refuse_unless(found != nullptr, kRtParamInvalid, "no event has this handle");
  return found;
}

std::size_t n_streams(const Runtime& state, int device) {
  std::size_t count = 0;
  for (const auto& [handle, stream] : state.streams) {
    const auto context = stream->context.lock();
    if (context == nullptr || context->device != device) continue;
    const auto model = stream->model.lock();
    const bool is_part = model != nullptr && model->is_captured;
    if (is_part && state.settings.software_sq) continue;  // bound while it executes
    ++count;
    const auto part = stream->part.lock();
    if (is_part && part != nullptr && !part->tasks.empty()) {
      count += (part->tasks.size() - 1) / state.settings.stream_depth;
    }
  }
  return count;
}

void require_streams(const Runtime& state, int device, std::size_t n_more) {
  if (n_streams(state, device) + n_more <= state.settings.stream_limit) return;
  refuse(state.settings.no_stream_code,
         text("all %zu streams of device %d are in use", state.settings.stream_limit, device));
}

std::shared_ptr<StreamState> make_stream(Runtime& state,
                                         const std::shared_ptr<ContextState>& context,
                                         std::uint32_t priority, std::uint32_t flags) {
  auto stream = std::make_shared<StreamState>();
  stream->queue = state.device.scheduler.create(/*blocking=*/false);
  stream->handle = stream->queue->handle;
  stream->context = context;
  stream->priority = priority;
  stream->flags = flags;
  while (state.stream_ids.count(stream->id) != 0) ++stream->id;
  state.stream_ids.insert(stream->id);
  state.streams[stream->handle] = stream;
  return stream;
}

void remove_stream(Runtime& state, StreamState& stream) {
  if (state.streams.count(stream.handle) == 0) return;  // removed with its device
  state.device.scheduler.drop(*stream.queue);
  state.device.scheduler.remove(stream.handle);
  state.stream_ids.erase(stream.id);
  state.streams.erase(stream.handle);  // may be the last owner
}

void require_no_capture(const Runtime& state, const ContextState& context) {
  for (const auto& capture : state.captures.all()) {
    if (capture->context.lock().get() != &context) continue;
    refuse(kRtStreamCaptured, "a stream of the context captures");
  }
}

void require_not_capturing(const StreamState& stream) {
  refuse_unless(stream.capture == nullptr, kRtStreamCaptured, "the stream captures");
}

void require_not_captured(const EventState& event) {
  refuse_unless(event.captured_in.expired(), kRtEventCaptured,
                "the event was last recorded in a capture");
}

int code_of(Status status) {
  switch (status) {
    case Status::kInvalidValue:
    case Status::kInvalidHandle:
      return kRtParamInvalid;
    case Status::kOutOfMemory:
      return kRtMemoryAllocation;
    case Status::kIllegalAddress:
      return kRtSysDma;
    case Status::kLaunchFailed:
      return kRtAicoreException;
    case Status::kOverlap:
      return kRtModelExecute;
    case Status::kBlocked:
      return kRtStreamSyncTimeout;
    default:  // the rest belongs to captures of another kind
      return kRtInternalError;
  }
}

namespace {

const char* why(Status status) {
  switch (status) {
    case Status::kInvalidValue:
      return "an address or size is invalid, or no device memory lies there";
    case Status::kOutOfMemory:
      return "out of device memory";
    case Status::kIllegalAddress:
      return "a copy touched memory that is not allocated; the device has failed";
    case Status::kLaunchFailed:
      return "a kernel failed; the device has failed";
    case Status::kOverlap:
      return "two executions of one model overlapped; the device has failed";
    case Status::kBlocked:
      return "the work waits for something that nobody has issued";
    default:
      return "the call is not possible now";
  }
}

}  // namespace

namespace {

const char* file_of(const void* address) {
  Dl_info information{};
  const bool is_known = dladdr(address, &information) != 0 && information.dli_fname != nullptr;
  return is_known ? information.dli_fname : "";
}

// Whether the library of the calling code has that part in its file name.
bool is_called_by(const std::string& part) {
  constexpr int kMostFrames = 16;
  void* frames[kMostFrames];
  const int n_frames = backtrace(frames, kMostFrames);
  const std::string own = file_of(reinterpret_cast<const void*>(&is_called_by));
  for (int index = 0; index < n_frames; ++index) {
    const std::string file = file_of(frames[index]);
    if (file != own) return file.find(part) != std::string::npos;
  }
  return false;
}

}  // namespace

std::optional<int> note(Runtime& state, const char* function) {
  auto& ledger = state.device.ledger;
  const auto code = ledger.note(function);
  const std::string& caller = state.settings.caller;
  if (caller.empty() || !is_called_by(caller)) return code;
  const auto of_caller = ledger.note(std::string(function) + " by " + caller);
  return code ? code : of_caller;
}

int tell_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const Refusal& refusal) {
    return tell(function, refusal.code, refusal.why);
  } catch (const DeviceError& error) {
    return tell(function, code_of(error.status), why(error.status));
  } catch (...) {
    return tell(function, kRtInternalError, "an exception of the simulator");
  }
}

void let_time_pass(Runtime& state) {
  ++state.waited_ms;
  const bool takes_time = state.settings.waits_take_time;
  state.device.mutex.unlock();
  if (takes_time) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  state.device.mutex.lock();
}

// Source: the runtime's documentation of aclmdlRICaptureBegin, aclmdlRIGetStreams,
// aclrtCreateStream and aclrtCreateEvent.
Chip chip_of(const std::string& soc_name) {
  const auto begins = [&](const char* start) { return soc_name.rfind(start, 0) == 0; };
  const bool is_a2 =
      begins("Ascend910B") && soc_name.size() > 10 && soc_name[10] >= '0' && soc_name[10] <= '9';
  if (begins("Ascend310P")) return {true, false, 1024, 1023, false};
  if (begins("Ascend310B")) return {false, false, 512, 65536, false};
  if (begins("Ascend910") && !is_a2 && !begins("Ascend910_93")) return {false, false, 2048, 65536};
  return {};
}

void require_capturing_chip(const Runtime& state) {
  refuse_unless(state.settings.chip.captures, kRtFeatureNotSupport, "the chip captures no models");
}

void require_telling_chip(const Runtime& state) {
  refuse_unless(state.settings.chip.tells_tasks, kRtFeatureNotSupport,
                "the tasks of models are neither told nor changed on this chip");
}

bool reset(Runtime& state) {
  if (state.device.scheduler.is_executing()) return false;
  state.offline.reset();
  for (const auto& [handle, stream] : state.streams) {
    stream->capture.reset();
    stream->update.reset();
  }
  state.captures.clear();
  reset_thread_mode();
  state.models.clear();
  state.conditions.clear();
  state.tasks.clear();
  state.events.clear();
  state.n_pooled_events = 0;
  state.binaries.clear();
  state.functions.clear();
  state.images.clear();
  state.streams.clear();
  state.stream_ids.clear();
  state.registered_host.clear();
  for (const auto& context : state.contexts.all()) context->default_stream.reset();
  state.device.reset();  // after the owners of blocks of its memory
  state.arguments.reset();
  state.settings = Settings();
  state.waited_ms = 0;
  for (const auto& context : state.contexts.all()) {
    if (!context->is_primary) {
      state.contexts.remove(context->handle);
      continue;
    }
    context->default_stream = make_stream(state, context, 0, 0);
  }
  return true;
}

}  // namespace simulated_ascend
