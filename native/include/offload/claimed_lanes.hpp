// Lanes of launches that any available thread claims: the caller's, or a helper's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "offload/helpers.hpp"

namespace offload {

// A step of a lane: run consecutive launches, record an event, or wait for an event.
struct LaneStep {
  enum class Kind : std::uint8_t { kRun, kRecord, kWait };

  Kind kind = Kind::kRun;
  std::size_t first = 0;  // launch, or event
  std::size_t last = 0;   // kRun: the launch after the last one
};

// The launches that lanes execute.
//
// Owner: the executing object. Thread: run is called on the caller's thread or a helper's, for each
// lane on one thread at a time; what one thread did for a lane is visible to the next. Errors: run
// throws those of launches.
class LaneWork {
 public:
  // Runs the launches from `launch` up to `last`, advancing `launch`; returns early once `stopped`.
  virtual void run(std::size_t lane, std::size_t& launch, std::size_t last,
                   const std::atomic<bool>& stopped) = 0;

  // On a helper's thread: calls `drive` once, with the thread set up to run launches. Accesses no
  // member once `drive` has begun: this object may no longer exist when `drive` returns.
  virtual void take_part(const std::function<void()>& drive) = 0;

 protected:
  ~LaneWork() = default;
};

// Executes lanes. The caller, or an available helper, claims a lane by compare-and-swap. A thread
// whose lane must wait gives it back if another lane can proceed, so that no lane depends on a
// particular thread; the caller needs no helper. Waiting threads spin for a while, then sleep.
//
// Owner: shared with the helpers that take part. Thread: one executes at a time. Errors: execute
// throws, after all threads have stopped, the error of the failed launch that is first in recorded
// order; no further launch of the execution begins after a failure. The constructor throws
// std::invalid_argument for an event that is not recorded exactly once, or a wait for an event of
// the same lane.
class ClaimedLanes final : public Helped, public std::enable_shared_from_this<ClaimedLanes> {
 public:
  // `of` identifies the executed object for `is_helping_with`.
  ClaimedLanes(LaneWork& work, std::vector<std::vector<LaneStep>> lanes, const void* of = nullptr);
  ~ClaimedLanes() override;
  ClaimedLanes(const ClaimedLanes&) = delete;
  ClaimedLanes& operator=(const ClaimedLanes&) = delete;

  std::size_t n_lanes() const { return steps_.size(); }

  // Executes all lanes with at most `n_helpers` helpers.
  void execute(std::size_t n_helpers);

  // Whether the calling thread is a helper in an execution of `of` that another thread started:
  // waiting for its end there would deadlock.
  static bool is_helping_with(const void* of) noexcept;

  // Launches that helpers have run, over all executions.
  std::uint64_t n_helped() const noexcept { return n_helped_; }

  void help() noexcept override;
  void abandon() noexcept override;

 private:
  struct alignas(64) Lane {
    std::atomic<std::uint64_t> claim = 0;  // number of the execution, and free, taken or ended
    std::atomic<std::size_t> awaited = 0;  // free lane: 1 + the event that it waits for
    std::size_t at = 0;                    // next step
    std::size_t failed = 0;                // the failed launch, if there is an error
    std::exception_ptr error;
    std::thread::id owner;
  };
  struct alignas(64) Event {
    std::atomic<std::uint64_t> execution = 0;  // the last that recorded it
  };

  void begin();
  void drive(std::uint64_t execution, std::size_t mine, bool helps);
  bool go_on(std::size_t lane, std::uint64_t execution, bool helps);
  void end(std::size_t lane, std::uint64_t execution);
  void give_back(std::size_t lane, std::uint64_t execution);
  bool can_go_on(const Lane& lane, std::uint64_t execution) const;
  bool is_one_ready(std::uint64_t execution) const;
  std::size_t take_ready(std::uint64_t execution);
  bool is_over(std::uint64_t execution) const;
  bool is_recorded(std::size_t event, std::uint64_t execution) const {
    return events_[event].execution == execution;
  }
  template <typename Ready>
  void wait_until(Ready ready);
  void signal();
  void rethrow_first();

  LaneWork& work_;
  const void* of_;
  std::vector<std::vector<LaneStep>> steps_;  // by lane
  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Event[]> events_;
  std::atomic<std::uint64_t> execution_ = 0;  // number of the latest
  std::atomic<std::size_t> n_ended_ = 0;      // of the latest execution
  std::atomic<bool> stopped_ = false;         // a launch has failed
  std::atomic<std::uint64_t> n_helped_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::size_t> n_sleeping_ = 0;
};

}  // namespace offload
