// Host stages: what the host does for each launch, on one thread or as a pipeline of several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "offload/thread_owner.hpp"

namespace offload {

// The stages of one launch, in order.
enum class HostStage : std::uint8_t {
  kTile,    // infers shapes, and computes the grid and the arguments
  kMemory,  // writes addresses into the arguments
  kLaunch,  // calls the device's runtime
};

// Launches that the host carries out stage by stage.
//
// Owner: the caller of HostStages::run. Thread: carry_out on several at once, never twice for one
// stage of one launch. Errors: carry_out may throw anything.
class StagedLaunches {
 public:
  virtual std::size_t n_launches() const = 0;
  virtual void carry_out(HostStage stage, std::size_t launch) = 0;

 protected:
  ~StagedLaunches() = default;
};

// Observes stages on the threads that carry them out: `begins` after the launch was taken over from
// the stage before, `ends` before it is handed to the next one. A stage that throws does not end.
//
// Owner: the caller of HostStages::run. Thread: several at once. Errors: none.
class StageWatcher {
 public:
  virtual void begins(HostStage stage, std::size_t launch) noexcept = 0;
  virtual void ends(HostStage stage, std::size_t launch) noexcept = 0;

 protected:
  ~StageWatcher() = default;
};

// Threads for the stages of launches. With one core the calling thread carries out all stages of a
// launch before the next launch. With two a second thread tiles. With n > 2 one thread writes
// addresses and n - 2 threads tile, launch i on thread i % (n - 2). The calling thread launches, so
// the stages of the device's runtime stay on one thread. These are the workers of Ascend's graph
// engine (one MEMORY, one LAUNCH where n > 2, at least one NORMAL); with two cores the launch
// follows MEMORY here, which leaves NORMAL the slowest stage alone.
//
// The threads start with the first run that needs them. After a fork the child starts its own.
//
// Owner: one resident, which makes it when none of its executions can be under way. Thread: any,
// without the GIL; runs take turns. Errors: run throws the error of the first launch that failed,
// as on one core: launches before it were launched, it and later ones were not, though they may
// have been tiled. ExecutionError where no thread can be started or after close. No thread works on
// the launches any more then.
class HostStages final : private ThreadOwner {
 public:
  // `of`: what is executed, for `is_helping_with`.
  explicit HostStages(int n_cores, const void* of = nullptr);
  ~HostStages();
  HostStages(const HostStages&) = delete;
  HostStages& operator=(const HostStages&) = delete;

  int n_cores() const noexcept { return n_cores_; }

  // Carries out every stage of all launches. `watcher` may be null.
  void run(StagedLaunches& launches, StageWatcher* watcher);

  // Whether the calling thread is one of the threads that run stages of this: waiting for the end
  // of an execution would never end there.
  static bool is_helping_with(const void* of) noexcept;

  // Waits for a run, and ends the threads. Not on one of them.
  void close() noexcept;

 private:
  struct Pass;
  struct Workers;

  void start_workers();
  void work(std::size_t worker, std::uint64_t n_seen);
  void end_workers() noexcept;

  void hold() noexcept override { running_.lock(); }
  void release() noexcept override { running_.unlock(); }
  void restart() noexcept override;
  void end() noexcept override { close(); }

  int n_cores_;
  const void* of_;
  std::mutex running_;  // held by run
  std::unique_ptr<Workers> workers_;
};

}  // namespace offload
