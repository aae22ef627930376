// The native seam of a backend: a program resident on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/clock.hpp"
#include "offload/fence.hpp"
#include "offload/header.hpp"
#include "offload/pass_report.hpp"
#include "offload/sizes.hpp"

namespace offload {

// When each launch of an execution began and ended; kept only where a timeline asks.
struct LaunchTimes {
  explicit LaunchTimes(std::size_t n_launches) : begin_ns(n_launches), end_ns(n_launches) {}

  std::vector<std::uint64_t> begin_ns;
  std::vector<std::uint64_t> end_ns;
  std::uint64_t clock_reads = 0;  // made for these times alone
};

// The moments of the stage of m_l_t that is the resident's own, submit, in ns of the steady clock.
struct Submission {
  static constexpr std::size_t kMostSubstages = 8;

  // When it ended: the first launch begins; on a device that queues work the program was delivered.
  std::uint64_t end_ns = 0;

  // By substage when it ended, each beginning where the one before ended, or where submit began;
  // 0: this execution had nothing to do there. Together they are submit, if there are any.
  std::array<std::uint64_t, kMostSubstages> substage_ends_ns{};

  void end_substage(std::size_t substage) { substage_ends_ns[substage] = now_ns(); }

  // The last substage, and submit with it.
  void end(std::size_t substage) { substage_ends_ns[substage] = end_ns = now_ns(); }
};

// What an execution proved before it used it: launches that it ran by two routes and compared.
struct Proof {
  std::uint64_t n_launches = 0;
  std::uint64_t n_failed = 0;  // of these; they run as recorded
  std::uint64_t ns = 0;        // beyond what the launches themselves took
};

// A feature map of a resident's own. Its address stays until the resident is closed.
struct OwnArena {
  std::uint64_t address = 0;

  // What stands for it where other residents use the same memory, leased while this one executes or
  // issues (no tensor lies at that address); 0: nobody else uses it.
  std::uint64_t lease_id = 0;
};

// The role of a resident whose weights are streamed while it executes.
//
// Owner, thread: as Resident, and as its methods. Errors: take_pass throws ExecutionError where the
// device fails.
class WeightPasses {
 public:
  // Whether the next execution keeps when weights came. Called before each execution, and with
  // false when nobody asks any more.
  virtual void trace_weights(bool traces) = 0;

  // What the last execution did with weights, once. Waits for its outputs where the device's clock
  // is read for that.
  virtual PassReport take_pass() = 0;

 protected:
  ~WeightPasses() = default;
};

// The role of a resident on a device with streams: execute returns once the work is enqueued.
//
// Owner, thread: as Resident, and as its methods. Errors: all throw ExecutionError.
class DeviceStreams {
 public:
  // Where the next execution and its copies go, after all that this resident has executed and what
  // was copied for it. Called before each execution. Throws also for a stream that is being
  // captured.
  virtual void set_stream(std::uint64_t stream) = 0;

  // Whether its work goes to torch's current stream of the calling thread, as torch's own does:
  // then nobody asks for a handle, and set_stream is given 0.
  virtual bool follows_torch() const { return false; }

  // Where it follows torch the stream that was current at set_stream.
  virtual std::optional<c10::Stream> torch_stream() const { return std::nullopt; }

  // Enqueues a copy of bytes where set_stream said, and gives true. False: nothing is done, and
  // torch's own copy is in order.
  virtual bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) = 0;

  // The end of what was enqueued so far; null where nothing is under way. Throws once nothing is
  // under way any more, where the device can tell.
  virtual std::unique_ptr<Fence> fence() = 0;

 protected:
  ~DeviceStreams() = default;
};

// The role of a resident whose kernels read the states of random generators from memory.
//
// Owner, thread: as Resident, and as its methods. Errors: set_random throws ExecutionError, also
// for another number of states.
class GeneratorStates {
 public:
  // For each generator of the program the seed and the offset that the next execution draws from.
  // Called after set_stream.
  virtual void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) = 0;

 protected:
  ~GeneratorStates() = default;
};

// A program that is loaded on a device and can be executed at the addresses that its words hold.
// What only some devices have is a role of its own: asked for once, null for who has it not, and
// valid until close.
//
// Owner: one Replay, which serialises all calls. Thread: any, without the GIL. Replay has entered a
// KernelScope (no autograd, none of torch's modes) around execute and issue, but not of a resident
// with DeviceStreams: there torch's thread-local modes are the caller's. Errors: execute throws
// ExecutionError for a failing launch, CaptureError for one that lays its result out otherwise than
// recorded, and BindingError for a failing guard; patch never throws.
class Resident {
 public:
  virtual ~Resident() = default;

  // Where each relocated word gets its address from; read once, when the header is made.
  virtual std::vector<Relocation> relocations() const = 0;

  // Writes words. Called before execute, with every word that changed since the last call.
  virtual void patch(const std::vector<Patch>& patches) noexcept = 0;

  virtual std::size_t n_launches() const = 0;

  // Runs all launches, and sets the moments of submit. `times` may be null: then no other clock is
  // read. Else a launch begins where the one before ended, the first at submission.end_ns, and the
  // clock is read once behind each and counted; a device that queues work leaves them alone.
  virtual void execute(Submission& submission, LaunchTimes* times) = 0;

  // Runs one launch: what a host does that schedules launch by launch, in program order.
  virtual void issue(std::size_t launch) = 0;

  // Whether execute itself delivers launch by launch; the times that it keeps are then those of
  // delivery. Asked once.
  virtual bool delivers_launches() const { return false; }

  // Hands over an output that its operator allocated itself.
  virtual c10::Storage take(std::size_t slot) = 0;

  // What submit consists of on this device, in order, by the words of its own; none: it is a whole.
  // At most Submission::kMostSubstages. Asked once.
  virtual std::vector<std::string> substages() const { return {}; }

  // What the last execution proved. Asked after the first execution that ended well, and after
  // each that had other sizes than the one before.
  virtual Proof proof() const { return {}; }

  // None: whoever drives it provides the feature map. Asked once.
  virtual std::optional<OwnArena> arena() const { return std::nullopt; }

  virtual WeightPasses* weight_passes() { return nullptr; }
  virtual DeviceStreams* device_streams() { return nullptr; }
  virtual GeneratorStates* generator_states() { return nullptr; }
  virtual SizeChanges* size_changes() { return nullptr; }

  // Waits for what was executed and gives back what it holds on the device; nothing is executed
  // any more. Where nobody can wait, as yet, it gives back when it is closed again, or destroyed.
  virtual void close() noexcept {}
};

}  // namespace offload
