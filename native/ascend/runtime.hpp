// The Ascend runtime, opened at run time: its functions, capabilities and errors, and the contexts
// that it works in.
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

// Streams of one device, for all that use it, by the name of its SoC and CANN's documentation of
// aclrtCreateStream: 512 on 310B, 1024 on 310P, 2048 on 910, 1984 on A2 (Ascend910B1 and later), A3
// (Ascend910_93..) and 950. Nothing for a name that is none of these.
std::optional<int> stream_budget(std::string_view soc_name);

// The function table of the runtime's libraries, each symbol looked up in all of them: in
// libascendcl.so, and where CANN is split, in libacl_rt.so, libacl_mdl.so and libnnopbase.so.
//
// The runtime is initialised once by reference: an earlier aclInit of the process (torch_npu's) is
// as good, and aclFinalize, which ends the runtime for everybody, is never called.
//
// In the child of a fork nothing of it is called any more: a device's runtime, and the threads that
// it counts on, stay with the parent. Each function then gives an error, and nothing is given back.
//
// When the process exits no reference is given back either. aclFinalizeReference would have to come
// behind the last call of the last resident, or it ends the runtime under that where nobody else
// holds a reference; and residents live on while the interpreter is torn down, in no known order.
// Nor does it help torch_npu, whose own exit function ends the runtime for everybody by
// aclFinalize, whatever the count is. So release() is for those who know that nothing is left.
//
// Owner: the process; never closed, since objects of static life may still use it. Thread: any.
// Errors: get, initialize and require throw BackendUnavailable; check, fail and check_memory throw
// OutOfMemory where the device's memory ran out, OutOfStreams where its streams or what its driver
// needs for one did, else ExecutionError.
class Runtime {
 public:
  // Opens the libraries, resolves every function and initialises the runtime; done once, tried
  // again after a failure. Throws naming the library or symbol that is missing, why the runtime
  // does not start, or that the process was forked since.
  static const Runtime& get();

  // Whether this process was forked from the one that opened the runtime.
  bool is_forked() const { return is_forked_; }

  // Takes a reference on the runtime once more: needed where somebody has ended it for everybody.
  void initialize() const;

  // Gives back the references that this process took through offload, where the runtime counts
  // them (CANN 8.5 and later). Nothing is called afterwards.
  void release() const noexcept;

  bool has(Capability capability) const { return missing_[index_of(capability)].empty(); }

  // Throws naming the symbols that are missing, and what needs them.
  void require(Capability capability, const char* what) const;

  // Whether it has copies whose source it stages at the call (kHostToBufferToDevice). Nothing tells
  // of an enumerator; this one came with the headers (8.5) in which this function is new.
  bool stages_copies() const { return has(Capability::kMemcpyOffset); }

  // By name, what the runtime has; "core" is not among them.
  std::vector<std::pair<std::string, bool>> capabilities() const;

  // Throws with the code, its name and the runtime's own words, and what was attempted.
  void check(Error error, const std::string& what) const {
    if (error != kSuccess) fail(error, what);
  }
  void check(Error error, const char* what) const {
    if (error != kSuccess) fail(error, what);
  }

  // The same, saying how many bytes were wanted if memory ran out.
  void check_memory(Error error, std::size_t n_bytes, const char* what) const;

  [[noreturn]] void fail(Error error, const std::string& what) const;

  // This thread's context; null if it has none, which leaves no message behind.
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

// The default context of a device, which torch_npu uses too. It stays until the process ends: it
// may not be ours to end.
//
// Thread: any. Errors: the constructor throws BackendUnavailable for a device that does not exist,
// ExecutionError if the context cannot be had.
class Device {
 public:
  Device(const Runtime& runtime, int index);

  Context context() const { return context_; }
  int index() const { return index_; }

 private:
  int index_ = 0;
  Context context_ = nullptr;
};

// While it lives, a device's context is this thread's current one. A thread that had none keeps it.
//
// Owner: a stack frame. Errors: none; a context that cannot be set shows in the next call.
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

// While it lives, calls on this thread that a stream capture would refuse are let through, since
// they do not concern the captured work; where the runtime has that.
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
  CaptureMode mode_ = kCaptureRelaxed;  // then the one before
  bool changed_ = false;
};

// Device memory.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError. No bytes: no memory, address 0.
class DeviceMemory {
 public:
  DeviceMemory(const Runtime& runtime, std::size_t n_bytes, const char* what);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return address_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(address_); }
  std::size_t size_bytes() const { return n_bytes_; }

  // Leaves the memory to the process.
  void abandon() noexcept { address_ = nullptr; }

 private:
  const Runtime& runtime_;
  std::size_t n_bytes_;
  void* address_ = nullptr;
};

// Streams that a loaded program uses up, its own or its model's: they count against the budget.
//
// Owner: one object. Thread: any. Errors: none.
class CountedStreams {
 public:
  explicit CountedStreams(int n_streams = 1);
  ~CountedStreams();
  CountedStreams(const CountedStreams&) = delete;
  CountedStreams& operator=(const CountedStreams&) = delete;

  // How many there are now in this process.
  static int count();

 private:
  int n_streams_;
};

// A stream of our own.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError; OutOfStreams, which says how many streams offload holds and
// what the device has, where they ran out.
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

// An event that orders streams and that hosts wait for; it can be recorded again. One with
// kEventExternal alone orders the streams on both sides of a model's border: hosts do not wait for
// it, who has waited resets it, and a device has few of them (1,023 on 310P, else 65,536).
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
// where making one fails otherwise than by a refusal.
bool makes_events(const Runtime& runtime, std::uint32_t flags, const char* what);

}  // namespace offload::acl
