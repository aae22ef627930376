// The Ascend runtime, opened at run time: its functions, capabilities and errors, and its contexts.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ascend/acl_functions.hpp"

namespace offload::acl {

// The number of streams of one device, for all its users, by the name of its SoC and CANN's
// documentation of aclrtCreateStream: 512 on 310B, 1024 on 310P, 2048 on 910, 1984 on A2
// (Ascend910B1 and later), A3 (Ascend910_93..) and 950. None for any other name.
std::optional<int> stream_budget(std::string_view soc_name);

// The function table of the runtime's libraries, each symbol looked up in all of them: in
// libascendcl.so, and where CANN is split, in libacl_rt.so, libacl_mdl.so and libnnopbase.so.
//
// The runtime is initialised once by reference: an earlier aclInit of the process (torch_npu's)
// suffices, and aclFinalize, which ends the runtime for all users, is never called.
//
// A forked child calls no function of it: a device's runtime, and its threads, stay with the
// parent. Each function then returns an error, and nothing is freed.
//
// At process exit no reference is released either. aclFinalizeReference would have to follow the
// last call of the last resident, or it would end the runtime under that resident if no other
// reference exists; and residents are destroyed while the interpreter is torn down, in unknown
// order. Nor would it help torch_npu, whose exit function ends the runtime for all users by
// aclFinalize, whatever the count. So release() is for callers that know that nothing is left.
//
// Owner: the process; never closed, since objects of static life may still use it. Thread: any.
// Errors: get, initialize and require throw BackendUnavailable; check, fail and check_memory throw
// OutOfMemory where the device's memory ran out, OutOfStreams where its streams or their driver
// resources did, else ExecutionError.
class Runtime {
 public:
  // Opens the libraries, resolves every function and initialises the runtime; once, and again after
  // a failure. The error names the missing library or symbol, why the runtime does not start, or
  // that the process was forked since.
  static const Runtime& get();

  // Whether this process was forked from the one that opened the runtime.
  bool is_forked() const { return is_forked_; }

  // Takes another reference on the runtime: required after the runtime was ended for all users.
  void initialize() const;

  // Releases the references that this process took through offload, where the runtime counts them
  // (CANN 8.5 and later). No call follows.
  void release() const noexcept;

  bool has(Capability capability) const { return missing_[index_of(capability)].empty(); }

  // The error names the missing symbols, and what needs them.
  void require(Capability capability, const char* what) const;

  // Whether it has copies whose source is staged at the call (kHostToBufferToDevice). An enumerator
  // cannot be queried; this one came with the headers (8.5) in which this function is new.
  bool stages_copies() const { return has(Capability::kMemcpyOffset); }

  // The runtime's capabilities by name, without "core".
  std::vector<std::pair<std::string, bool>> capabilities() const;

  // The error has the code, its name and the runtime's own words, and what was attempted.
  void check(Error error, const std::string& what) const {
    if (error != kSuccess) fail(error, what);
  }
  void check(Error error, const char* what) const {
    if (error != kSuccess) fail(error, what);
  }

  // The same, stating the requested bytes if memory ran out.
  void check_memory(Error error, std::size_t n_bytes, const char* what) const;

  [[noreturn]] void fail(Error error, const std::string& what) const;

  // This thread's context; null if it has none, without leaving an error message.
  Context current_context() const;

  // "507015 ACL_ERROR_RT_AICORE_EXCEPTION (what the runtime says of it)".
  std::string describe(Error error) const;

#define OFFLOAD_DECLARE(name, symbol, capability, result, signature) \
  result(*name) signature = nullptr;
  OFFLOAD_ACL_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE

 private:
  static std::size_t index_of(Capability capability) {
    return static_cast<std::size_t>(capability);
  }
  void open();
  void end_in_child() noexcept;

  std::array<std::string, kCapabilities> missing_;  // symbols, by capability
  bool is_forked_ = false;
};

// The default context of a device, which torch_npu uses too. It stays until the process ends, as it
// may belong to another user of the runtime.
//
// Thread: any. Errors: the constructor throws BackendUnavailable for a device that does not exist,
// ExecutionError if the context is unavailable.
class Device {
 public:
  Device(const Runtime& runtime, int index);

  Context context() const { return context_; }
  int index() const { return index_; }

 private:
  int index_ = 0;
  Context context_ = nullptr;
};

// Makes a device's context current on this thread during its life. A thread that had no context
// keeps it.
//
// Owner: a stack frame. Errors: none; a context that cannot be set is an error of the next call.
class ContextScope {
 public:
  ContextScope(const Runtime& runtime, const Device& device) : runtime_(runtime) {
    before_ = runtime_.current_context();
    changed_ = before_ != device.context();
    if (changed_) runtime_.set_current_context(device.context());
  }
  ~ContextScope() {
    if (changed_ && before_ != nullptr) runtime_.set_current_context(before_);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Runtime& runtime_;
  Context before_ = nullptr;
  bool changed_ = false;
};

// During its life, calls on this thread that a stream capture would refuse are permitted, since
// they do not concern the captured work; where the runtime supports it.
//
// Owner: a stack frame. Errors: none.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Runtime& runtime) : runtime_(runtime) {
    changed_ = runtime_.has(Capability::kExchangeMode) &&
               runtime_.exchange_capture_mode(&mode_) == kSuccess;
  }
  ~RelaxedCapture() {
    if (changed_) runtime_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Runtime& runtime_;
  CaptureMode mode_ = kCaptureRelaxed;  // then the previous mode
  bool changed_ = false;
};

// Device memory.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError. Without bytes it has no memory, and address 0.
class DeviceMemory {
 public:
  DeviceMemory(const Runtime& runtime, std::size_t n_bytes, const char* what);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return address_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(address_); }
  std::size_t size_bytes() const { return n_bytes_; }

  // Leaks the memory until the process ends.
  void abandon() noexcept { address_ = nullptr; }

 private:
  const Runtime& runtime_;
  std::size_t n_bytes_;
  void* address_ = nullptr;
};

// Streams that a loaded program uses, its own or its model's: they count against the budget.
//
// Owner: one object. Thread: any. Errors: none.
class CountedStreams {
 public:
  explicit CountedStreams(int n_streams = 1);
  ~CountedStreams();
  CountedStreams(const CountedStreams&) = delete;
  CountedStreams& operator=(const CountedStreams&) = delete;

  // The present number in this process.
  static int count();

 private:
  int n_streams_;
};

// A stream of our own.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError; OutOfStreams, which states how many streams offload holds and
// the device has, where they ran out.
class OwnStream {
 public:
  OwnStream(const Runtime& runtime, std::uint32_t flags);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream handle() const { return stream_; }

 private:
  const Runtime& runtime_;
  Stream stream_ = nullptr;
};

// An event that orders streams and that hosts wait for; it can be recorded again. Only an event
// with kEventExternal orders streams across a model's border: hosts do not wait for it, its waiter
// resets it, and a device has few of them (1,023 on 310P, else 65,536).
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError.
class OrderEvent {
 public:
  explicit OrderEvent(const Runtime& runtime, std::uint32_t flags = kEventSync);
  ~OrderEvent();
  OrderEvent(const OrderEvent&) = delete;
  OrderEvent& operator=(const OrderEvent&) = delete;

  Event handle() const { return event_; }

 private:
  const Runtime& runtime_;
  Event event_ = nullptr;
};

// Whether the runtime makes events with these flags. Needs a current context. Throws ExecutionError
// where creation fails for another reason than a refusal.
bool makes_events(const Runtime& runtime, std::uint32_t flags, const char* what);

}  // namespace offload::acl
