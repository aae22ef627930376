// Lanes of launches that whichever thread is there claims: the caller's, or a helper's.
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

// A step of a lane of launches: launches in a row, the record of an event, or the wait for one.
struct LaneStep {
  enum class Kind : std::uint8_t { kRun, kRecord, kWait };

  Kind kind = Kind::kRun;
  std::size_t first = 0;  // launch, or event
  std::size_t last = 0;   // of a run, the launch behind the last one
};

// What launches are to lanes.
//
// Owner: whoever executes. Thread: run on the caller's or a helper's, of one lane on one at a time;
// what one thread did of a lane is seen by the next. Errors: run throws those of launches.
class LaneWork {
 public:
  // Runs the launches from `launch` up to `last`, counting `launch` on; ends early where `stopped`.
  virtual void run(std::size_t lane, std::size_t& launch, std::size_t last,
                   const std::atomic<bool>& stopped) = 0;

  // On a helper's thread: calls `drive` once, with what the thread needs to run launches in place.
  // Nothing of this object is touched once `drive` has begun: it may have gone when that returns.
  virtual void take_part(const std::function<void()>& drive) = 0;

 protected:
  ~LaneWork() = default;
};

// Executes lanes. A lane is claimed by a compare-and-swap: by the caller, or by a helper of the
// process where one comes. A thread whose lane waits for another gives it back where it finds one
// that can go on, so that no lane waits for a thread that is not there; the caller needs no helper.
// Who waits looks for a while, then sleeps.
//
// Owner: shared with the helpers that take part. Thread: one executes at a time. Errors: execute
// throws, once everybody has ended, the error of the first launch in recorded order of those that
// failed; others of the execution are not begun then. The constructor throws std::invalid_argument
// for an event that is not recorded once, or a wait for one of the same lane.
class ClaimedLanes final : public Helped, public std::enable_shared_from_this<ClaimedLanes> {
 public:
  // `of`: what is executed, for `is_helping_with`.
  ClaimedLanes(LaneWork& work, std::vector<std::vector<LaneStep>> lanes, const void* of = nullptr);
  ~ClaimedLanes() override;
  ClaimedLanes(const ClaimedLanes&) = delete;
  ClaimedLanes& operator=(const ClaimedLanes&) = delete;

  std::size_t n_lanes() const { return steps_.size(); }

  // Executes all lanes, with so many helpers at the most.
  void execute(std::size_t n_helpers);

  // Whether the calling thread is a helper that takes part in an execution of this, which another
  // thread has asked for: waiting for its end would never end there.
  static bool is_helping_with(const void* of) noexcept;

  // How many launches helpers have run, of all executions.
  std::uint64_t n_helped() const noexcept { return n_helped_; }

  void help() noexcept override;
  void abandon() noexcept override;

 private:
  struct alignas(64) Lane {
    std::atomic<std::uint64_t> claim = 0;  // the execution, and whether it is free, taken, ended
    std::atomic<std::size_t> awaited = 0;  // of a free one: 1 + the event without which it waits
    std::size_t at = 0;                    // the step that comes next
    std::size_t failed = 0;                // the launch, where there is an error
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
  std::atomic<std::uint64_t> execution_ = 0;  // by number, the latest
  std::atomic<std::size_t> n_ended_ = 0;      // lanes of it
  std::atomic<bool> stopped_ = false;         // a launch has failed
  std::atomic<std::uint64_t> n_helped_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::size_t> n_sleeping_ = 0;
};

}  // namespace offload
