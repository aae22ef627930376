// Controls of the device for tests: functions named sim_*, as those of the other skins.
#include <cstring>

#include "offline.hpp"
#include "symbols.hpp"

using namespace simulated_ascend;

namespace {

std::lock_guard<std::mutex> locked() { return std::lock_guard(runtime().device.mutex); }

}  // namespace

// 1: work runs as soon as it is issued; 0: when the host waits for it, or queries whether it is
// done.
ACL_EXPORT void sim_set_eager(int eager) {
  const auto lock = locked();
  try {
    runtime().device.scheduler.set_eager(eager != 0);
  } catch (const simulator::DeviceError&) {
    // The fault stays, and the next wait reports it.
  }
}

// The nth call from now (1: the next) of a function does nothing and returns this error code. On a
// capturing stream that counts as a failed submission, which invalidates the capture.
ACL_EXPORT void sim_fail(const char* function, std::uint64_t nth, int code) {
  const auto lock = locked();
  runtime().device.ledger.fail(function, nth, code);
}

// Counts a call of another library's function; returns the code that it must fail with, or 0.
ACL_EXPORT int sim_note(const char* function) {
  const auto lock = locked();
  return runtime().device.ledger.note(function).value_or(kSuccess);
}

// How often a function was called since the start or the last reset, failures included.
ACL_EXPORT std::uint64_t sim_calls(const char* function) {
  const auto lock = locked();
  return runtime().device.ledger.count(function);
}

// Calls by a library whose file name contains this part are counted, and can be planned to fail,
// under "FUNCTION by PART" as well; "" distinguishes no callers.
ACL_EXPORT void sim_set_caller(const char* part) {
  const auto lock = locked();
  runtime().settings.caller = part;
}

// Counts start at 0 again, the trace is empty, planned failures and refused calls are forgotten.
ACL_EXPORT void sim_forget_calls() {
  const auto lock = locked();
  forget_refusals();
  runtime().device.ledger.reset();
}

// 1: records the order of calls from now on; 0: discards it.
ACL_EXPORT void sim_set_tracing(int tracing) {
  const auto lock = locked();
  runtime().device.ledger.set_tracing(tracing != 0);
}

ACL_EXPORT std::size_t sim_trace_size() {
  const auto lock = locked();
  return runtime().device.ledger.trace().size();
}

// Entry such as "aclrtMemcpyAsync kind=5 bytes=64 stream=1"; null beyond the end. Valid until the
// thread's next query.
ACL_EXPORT const char* sim_trace_entry(std::size_t index) {
  thread_local std::string entry;
  const auto lock = locked();
  const auto& trace = runtime().device.ledger.trace();
  if (index >= trace.size()) return nullptr;
  entry = trace[index];
  return entry.c_str();
}

// A call that failed since calls were forgotten, with its code and the reason, in order; null
// beyond the end. Valid until the thread's next query.
ACL_EXPORT const char* sim_refusal(std::size_t index) {
  thread_local std::string entry;
  const auto found = refusal(index);
  if (!found) return nullptr;
  entry = *found;
  return entry.c_str();
}

// Hides this function from dlsym until sim_show_all. 0; -1 for an unknown name.
ACL_EXPORT int sim_hide(const char* function) {
  const auto lock = locked();
  return hide_symbol(function) ? 0 : -1;
}

// Makes the library that of CANN "8.1", "8.5", "9.0" or "9.1": later functions are hidden; "" shows
// all. 0; -1 for another word.
ACL_EXPORT int sim_set_personality(const char* version) {
  const auto lock = locked();
  return set_personality(version) ? 0 : -1;
}

// Whether the firmware binds streams while they execute: models then use up no streams, and their
// tasks can be read and changed.
ACL_EXPORT void sim_set_software_sq(int on) {
  const auto lock = locked();
  runtime().settings.software_sq = on != 0;
}

ACL_EXPORT void sim_set_device_count(int count) {
  const auto lock = locked();
  runtime().settings.n_devices = count;
}

// The device's memory in bytes.
ACL_EXPORT void sim_set_memory_limit(std::size_t n_bytes) {
  const auto lock = locked();
  runtime().device.memory.set_limit(n_bytes);
}

// The fate of freed device memory: 0 it stays readable, poisoned; 1 it faults; 2 its address goes
// to the next allocation of as many pages.
ACL_EXPORT void sim_set_free_policy(int policy) {
  const auto lock = locked();
  runtime().device.memory.set_free_policy(static_cast<simulator::FreePolicy>(policy));
}

ACL_EXPORT void sim_set_stream_limit(std::size_t count) {
  const auto lock = locked();
  runtime().settings.stream_limit = count;
}

// The code of a call when the device has no more streams: 207008, or 207005 as from drivers whose
// queues ran out.
ACL_EXPORT void sim_set_no_stream_code(int code) {
  const auto lock = locked();
  runtime().settings.no_stream_code = code;
}

// The result of aclrtGetSocName; the device then behaves as this chip, and has its streams and
// events.
ACL_EXPORT void sim_set_soc_name(const char* name) {
  const auto lock = locked();
  Settings& settings = runtime().settings;
  settings.soc_name = name;
  settings.chip = chip_of(name);
  settings.stream_limit = settings.chip.n_streams;
  settings.event_limit = settings.chip.n_events;
}

// How many tasks of task groups may be under update at once.
ACL_EXPORT void sim_set_update_limit(std::size_t n_tasks) {
  const auto lock = locked();
  runtime().settings.update_limit = n_tasks;
}

// How many tasks of a model fit on a stream before the model needs another.
ACL_EXPORT void sim_set_stream_depth(std::size_t n_tasks) {
  const auto lock = locked();
  runtime().settings.stream_depth = n_tasks;
}

// How many tasks fit on a stream that is bound to a model: drivers differ.
ACL_EXPORT void sim_set_bound_depth(std::size_t n_tasks) {
  const auto lock = locked();
  runtime().settings.bound_depth = n_tasks;
}

ACL_EXPORT void sim_set_event_limit(std::size_t count) {
  const auto lock = locked();
  runtime().settings.event_limit = count;
}

// How often aclmdlRIDestroy polls, once per millisecond, before it returns 107037.
ACL_EXPORT void sim_set_destroy_polls(int count) {
  const auto lock = locked();
  runtime().settings.destroy_polls = count;
}

// Duration of a wait without a timeout if the work that it waits for is never issued.
ACL_EXPORT void sim_set_patience_ms(int milliseconds) {
  const auto lock = locked();
  runtime().settings.patience_ms = milliseconds;
}

// 0: waits only count their milliseconds; 1: they last.
ACL_EXPORT void sim_set_waits_take_time(int take) {
  const auto lock = locked();
  runtime().settings.waits_take_time = take != 0;
}

// Milliseconds of waits since the last reset.
ACL_EXPORT std::uint64_t sim_waited_ms() {
  const auto lock = locked();
  return runtime().waited_ms;
}

// Rounds of a conditional task after which it is a fault of the device.
ACL_EXPORT void sim_set_loop_limit(std::size_t n_rounds) {
  const auto lock = locked();
  runtime().settings.loop_limit = n_rounds;
}

// Which of a model's streams runs as far as it may, when the host waits for the model or for an
// event of it: 0 the stream that joined last, 1 the stream that it began on.
ACL_EXPORT void sim_set_first_stream_first(int first) {
  const auto lock = locked();
  runtime().settings.first_stream_first = first != 0;
  runtime().device.scheduler.set_newest_first(first == 0);
}

// 0: tasks with unreadable parameters (of the AI CPU, copies, memsets) are in no enumeration.
ACL_EXPORT void sim_set_tells_all_tasks(int all) {
  const auto lock = locked();
  runtime().settings.tells_all_tasks = all != 0;
}

// 0: the address of a task's arguments in device memory is lost.
ACL_EXPORT void sim_set_keeps_addresses(int keeps) {
  const auto lock = locked();
  runtime().settings.keeps_addresses = keeps != 0;
}

// 0: the firmware refuses copies that read their addresses from memory, as older ones do.
ACL_EXPORT void sim_set_copies_by_offset(int copies) {
  const auto lock = locked();
  runtime().settings.copies_by_offset = copies != 0;
}

// 0: the driver cannot pin registered memory: aclrtHostRegisterV2 notes the range, and an
// asynchronous copy to or from it, which would meet pages that moved, is a fault of the device.
ACL_EXPORT void sim_set_locks_registered(int locks) {
  const auto lock = locked();
  runtime().settings.locks_registered = locks != 0;
}

// The nth copy that runs from now on (1: the next) is a fault of the device instead.
ACL_EXPORT void sim_fault_copy(std::uint64_t nth) {
  const auto lock = locked();
  runtime().device.scheduler.fault_copy(nth);
}

// From here on events read a virtual clock, on which each kernel and each copy takes this many ns,
// and each copy to an address given to sim_set_copy_ns its stated time.
ACL_EXPORT void sim_set_clock(std::int64_t kernel_ns, std::int64_t copy_ns) {
  const auto lock = locked();
  runtime().device.scheduler.set_clock({kernel_ns, copy_ns, {}});
}

// -1, without any change, if there is no such clock.
ACL_EXPORT int sim_set_copy_ns(std::uint64_t to, std::int64_t duration_ns) {
  const auto lock = locked();
  try {
    runtime().device.scheduler.set_copy_ns(to, duration_ns);
  } catch (const simulator::DeviceError&) {
    return -1;
  }
  return 0;
}

// Bytes of executed copies from memory of the host; copies staged at issue do not count.
ACL_EXPORT std::uint64_t sim_bytes_from_host() {
  const auto lock = locked();
  return runtime().device.scheduler.bytes_from_host();
}

// The device fails permanently, as after a kernel's exception.
ACL_EXPORT void sim_fault() {
  const auto lock = locked();
  runtime().device.scheduler.set_fault(simulator::Status::kLaunchFailed);
}

// Bytes of device memory that callers have allocated, including rounding.
ACL_EXPORT std::size_t sim_live_bytes() {
  const auto lock = locked();
  return runtime().device.memory.live_bytes() - runtime().arguments.slab_bytes();
}

// Bytes of pinned host memory, including what callers registered.
ACL_EXPORT std::size_t sim_host_bytes() {
  const auto lock = locked();
  std::size_t n_bytes = runtime().device.memory.host_bytes();
  for (const auto& [address, size_bytes] : runtime().registered_host) n_bytes += size_bytes;
  return n_bytes;
}

// Bytes of argument blocks that the runtime owns: of launches that have not run, and of models.
ACL_EXPORT std::size_t sim_argument_bytes() {
  const auto lock = locked();
  return runtime().arguments.live_bytes();
}

// The number of live "stream" (callers' own), "model stream", "event", "context", "binary",
// "image", "model", "task", "condition", "capture", "argument block", "registration",
// "reservation", "physical memory" (by a handle), "mapping", "offline model", "data buffer",
// "dataset", "description", "configuration" or "host memory" (pinned); -1 for another word.
ACL_EXPORT std::int64_t sim_live_objects(const char* kind) {
  const auto lock = locked();
  Runtime& state = runtime();
  const auto is = [kind](const char* word) { return std::strcmp(kind, word) == 0; };
  const auto streams = [&state](bool of_models) {
    std::int64_t count = 0;
    for (const auto& [handle, stream] : state.streams) {
      const auto model = stream->model.lock();
      const bool is_part = model != nullptr && model->is_captured;
      if (is_part == of_models && !is_default(*stream)) ++count;
    }
    return count;
  };
  if (is("stream")) return streams(false);
  if (is("model stream")) return streams(true);
  if (is("event")) return static_cast<std::int64_t>(state.events.size());
  if (is("context")) return static_cast<std::int64_t>(state.contexts.size());
  if (is("binary")) return static_cast<std::int64_t>(state.binaries.size());
  if (is("image")) return static_cast<std::int64_t>(state.images.size());
  if (is("model")) return static_cast<std::int64_t>(state.models.size());
  if (is("task")) return static_cast<std::int64_t>(state.tasks.size());
  if (is("condition")) return static_cast<std::int64_t>(state.conditions.size());
  if (is("capture")) return static_cast<std::int64_t>(state.captures.size());
  if (is("argument block")) return static_cast<std::int64_t>(state.arguments.n_live());
  if (is("registration")) return static_cast<std::int64_t>(state.registered_host.size());
  const simulator::Memory& memory = state.device.memory;
  if (is("host memory")) return static_cast<std::int64_t>(memory.n_host());
  if (is("reservation")) return static_cast<std::int64_t>(memory.n_reservations());
  if (is("physical memory")) return static_cast<std::int64_t>(memory.n_chunks());
  if (is("mapping")) return static_cast<std::int64_t>(memory.n_mappings());
  const OfflineState& of_files = offline(state);
  if (is("offline model")) return static_cast<std::int64_t>(of_files.models.size());
  if (is("data buffer")) return static_cast<std::int64_t>(of_files.buffers.size());
  if (is("dataset")) return static_cast<std::int64_t>(of_files.datasets.size());
  if (is("description")) return static_cast<std::int64_t>(of_files.descriptions.size());
  if (is("configuration")) {
    return static_cast<std::int64_t>(of_files.configurations.size() +
                                     of_files.execute_configurations.size());
  }
  return -1;
}

// How many streams of the device are in use, as its limit counts them.
ACL_EXPORT std::size_t sim_streams_in_use(int device) {
  const auto lock = locked();
  return n_streams(runtime(), device);
}

// 1 if the device may read all of [address, address + n_bytes).
ACL_EXPORT int sim_is_accessible(std::uint64_t address, std::size_t n_bytes) {
  const auto lock = locked();
  return runtime().device.memory.covering(address, n_bytes).empty() ? 0 : 1;
}

// Restores the initial state: memory, streams, models, counts, planned failures, faults and
// settings. The runtime stays initialised, and devices stay set with their contexts. 0; -1 without
// any change while work runs.
ACL_EXPORT int sim_reset() {
  const auto lock = locked();
  set_personality("");
  return reset(runtime()) ? 0 : -1;
}
