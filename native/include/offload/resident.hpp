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

// When each launch of an execution began and ended; kept only for a timeline.
struct LaunchTimes {
  explicit LaunchTimes(std::size_t n_launches) : begin_ns(n_launches), end_ns(n_launches) {}

  std::vector<std::uint64_t> begin_ns;
  std::vector<std::uint64_t> end_ns;
  std::uint64_t clock_reads = 0;  // made for these times alone
};

// Times of submit, the resident's own stage of m_l_t, in ns of the steady clock.
struct Submission {
  static constexpr std::size_t kMostSubstages = 8;

  // The end of submit: the first launch begins. On a device that queues work, the program has been
  // delivered.
  std::uint64_t end_ns = 0;

  // The end of each substage. Each begins where the one before ended, or where submit began; 0: not
  // used in this execution. Together the substages, if there are any, make up submit.
  std::array<std::uint64_t, kMostSubstages> substage_ends_ns{};

  void end_substage(std::size_t substage) { substage_ends_ns[substage] = now_ns(); }

  // Ends the last substage and submit.
  void end(std::size_t substage) { substage_ends_ns[substage] = end_ns = now_ns(); }
};

// What an execution proved before using it: launches that were run in two ways and compared.
struct Proof {
  std::uint64_t n_launches = 0;
  std::uint64_t n_failed = 0;  // of these; they run as recorded
  std::uint64_t ns = 0;        // beyond the duration of the launches themselves
};

// A resident's own feature map. Its address stays until the resident is closed.
struct OwnArena {
  std::uint64_t address = 0;

  // A stand-in address, leased while this resident executes or issues, where other residents use
  // the same memory; no tensor lies at that address. 0: the memory is not shared.
  std::uint64_t lease_id = 0;
};

// The role of a resident whose weights are streamed while it executes.
//
// Owner, thread: as Resident, and as its methods. Errors: take_pass throws ExecutionError where the
// device fails.
class WeightPasses {
 public:
  // Whether the next execution records when weights arrived. Called before each execution, and with
  // false once no timeline asks.
  virtual void trace_weights(bool traces) = 0;

  // What the last execution did with weights; each report is returned once. Waits for the outputs
  // where that requires the device's clock.
  virtual PassReport take_pass() = 0;

 protected:
  ~WeightPasses() = default;
};

// The role of a resident on a device with streams: execute returns once the work is enqueued.
//
// Owner, thread: as Resident, and as its methods. Errors: all throw ExecutionError.
class DeviceStreams {
 public:
  // Sets the stream of the next execution and its copies, which are ordered after all executions
  // and copies of this resident so far. Called before each execution. Throws also for a stream that
  // is being captured.
  virtual void set_stream(std::uint64_t stream) = 0;

  // Whether its work goes to torch's current stream of the calling thread, like torch's own work;
  // then the caller passes 0 to set_stream instead of a handle.
  virtual bool follows_torch() const { return false; }

  // If it follows torch, the stream that was current at set_stream.
  virtual std::optional<c10::Stream> torch_stream() const { return std::nullopt; }

  // Enqueues a copy on the stream of set_stream and returns true. False: nothing is done, and
  // torch's own copy works.
  virtual bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) = 0;

  // A fence after all enqueued work; null if none is in flight. On errors it throws once the work
  // has ended, where the device can tell.
  virtual std::unique_ptr<Fence> fence() = 0;

 protected:
  ~DeviceStreams() = default;
};

// The role of a resident whose kernels read the states of random generators from memory.
//
// Owner, thread: as Resident, and as its methods. Errors: set_random throws ExecutionError, also
// for a wrong number of states.
class GeneratorStates {
 public:
  // Sets, for each generator of the program, the seed and the offset that the next execution draws
  // from. Called after set_stream.
  virtual void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) = 0;

 protected:
  ~GeneratorStates() = default;
};

// A program that is loaded on a device and can be executed at the addresses that its words hold.
// Features that only some devices have are separate roles: queried once, null where absent, and
// valid until close.
//
// Owner: one Replay, which serialises all calls. Thread: any, without the GIL. Replay has entered a
// KernelScope (no autograd, no torch modes) around execute and issue, except for a resident with
// DeviceStreams, where torch's thread-local modes are the caller's. Errors: execute throws
// ExecutionError for a failing launch, CaptureError for a launch whose result has another layout
// than recorded, and BindingError for a failing guard; patch never throws.
class Resident {
 public:
  virtual ~Resident() = default;

  // The source of each relocated word's address; read once, when the header is made.
  virtual std::vector<Relocation> relocations() const = 0;

  // Writes words. Called before execute, with every word that changed since the last call.
  virtual void patch(const std::vector<Patch>& patches) noexcept = 0;

  virtual std::size_t n_launches() const = 0;

  // Runs all launches, and sets the times of submit. If `times` is null no other clock is read.
  // Otherwise each launch begins where the one before ended, the first at submission.end_ns, and
  // the clock is read once after each launch and counted; a device that queues work leaves `times`
  // unchanged.
  virtual void execute(Submission& submission, LaunchTimes* times) = 0;

  // Runs one launch, as a host that schedules launch by launch does, in program order.
  virtual void issue(std::size_t launch) = 0;

  // Whether execute itself delivers launch by launch; its times are then those of delivery. Asked
  // once.
  virtual bool delivers_launches() const { return false; }

  // Returns the storage of an output that its operator allocated itself.
  virtual c10::Storage take(std::size_t slot) = 0;

  // The names of submit's substages on this device, in order; empty: it has none. At most
  // Submission::kMostSubstages. Asked once.
  virtual std::vector<std::string> substages() const { return {}; }

  // What the last execution proved. Asked after the first execution that succeeds, and after each
  // with other sizes than the one before.
  virtual Proof proof() const { return {}; }

  // No value: the caller provides the feature map. Asked once.
  virtual std::optional<OwnArena> arena() const { return std::nullopt; }

  virtual WeightPasses* weight_passes() { return nullptr; }
  virtual DeviceStreams* device_streams() { return nullptr; }
  virtual GeneratorStates* generator_states() { return nullptr; }
  virtual SizeChanges* size_changes() { return nullptr; }

  // Waits for all executions and releases what it holds on the device; no execution follows. If
  // waiting is not possible yet, it releases when it is closed again or destroyed.
  virtual void close() noexcept {}
};

}  // namespace offload
