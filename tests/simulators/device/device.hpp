// The simulated device: memory, streams, graphs, captures and failures on demand.
#pragma once

#include <mutex>

#include "captures.hpp"
#include "graphs.hpp"
#include "ledger.hpp"
#include "memory.hpp"
#include "streams.hpp"

namespace simulator {

struct Module {
  std::uint64_t handle = 0;
};

// Owner: the skin, one in the process. Thread: every member under `mutex`, which a skin's functions
// hold; it is free while kernels and host functions run.
class Device {
 public:
  // Runs the work on the stream, or adds it to the stream's capture. Errors: kInvalidValue for an
  // operand that is not allocated, and those of Captures.
  void submit(Stream& stream, Work work);
  // Runs after the executable's other launches. In a capture it becomes one node, which keeps the
  // executable's current parameters.
  void launch(Stream& stream, Executable& executable);
  void record(Stream& stream, Event& event);
  void wait(Stream& stream, Event& event);
  // Waits for the stream's work, then removes it.
  void destroy_stream(std::uint64_t handle);

  // Restores the initial state, except that addresses and numbers are not reused. False, without
  // any change, while work runs.
  bool reset();

  std::mutex mutex;
  Ledger ledger;
  Memory memory;
  Graphs graphs{memory};
  Scheduler scheduler{mutex, memory, graphs};
  Captures captures{graphs, scheduler};
  Registry<Event> events;
  Registry<Module> modules;
  Registry<Kernel> kernels;  // by the handle of the function

  // The kernel with either handle. Errors: kInvalidHandle.
  std::shared_ptr<Kernel> kernel(std::uint64_t handle) const;
  void add_kernel(std::shared_ptr<Kernel> kernel);
  // Loads a kernel's code on the device, if it is not loaded: this takes memory, and may
  // synchronise the context. Errors: as Captures::require_safe.
  void load(Kernel& kernel);

  bool loads_late = false;  // kernels are loaded at their first use

 private:
  void require_usable(Stream& stream);
};

}  // namespace simulator
