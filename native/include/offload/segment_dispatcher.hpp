// Segments that are given to devices one by one, when they are ready.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "offload/alarm.hpp"
#include "offload/device_paces.hpp"
#include "offload/dispatch_check.hpp"
#include "offload/segment_dispatch.hpp"
#include "offload/ticket.hpp"

namespace offload {

// What is the same in all executions that one SegmentDispatcher dispatches. Values, memories and
// segments are numbered from 0.
struct DispatchPlan {
  SegmentGraph graph;
  ChoiceObjective objective = ChoiceObjective::kLatency;
  DispatchRules rules;
  std::vector<std::vector<std::int64_t>> shared;  // the Values of each SharedValues of the graph
  std::shared_ptr<DevicePaces> paces;
  // Calls a function with Python's GIL, and without it where the thread holds it.
  std::function<void(const std::function<void()>&)> with_gil, without_gil;

  // Throws PlanError where lengths or numbers do not fit one another.
  void check() const;
};

// The work of one execution, which devices and links do; and the proof of its steps.
//
// Owner: the submitter until it is added to a dispatcher, then the dispatcher until it has ended.
// Thread: one at a time. Errors: what `bind`, `submit` and `copy` throw is an error of the
// execution. Work that is destroyed without having been added fails its ticket.
class DispatchedWork {
 public:
  // The plan has passed its check.
  DispatchedWork(std::shared_ptr<const DispatchPlan> plan, std::shared_ptr<Ticket> done);
  virtual ~DispatchedWork();
  DispatchedWork(const DispatchedWork&) = delete;
  DispatchedWork& operator=(const DispatchedWork&) = delete;

  // Makes a segment ready to begin on a device, whose memory has all that it reads.
  virtual void bind(std::int64_t segment, std::int64_t device) = 0;
  // Queues the segment that was bound last; returns the ticket of its end.
  virtual std::shared_ptr<Ticket> submit(std::int64_t segment, std::int64_t device) = 0;
  // Queues a copy of Values of a producer (kCaller: the caller's); returns the ticket of its end.
  virtual std::shared_ptr<Ticket> copy(std::int64_t producer, std::int64_t origin,
                                       std::int64_t target,
                                       const std::vector<std::int64_t>& values) = 0;
  // The expected and the measured duration of a segment that has ended; empty: not measured.
  struct Took {
    double expected_ns, measured_ns;
  };
  virtual std::optional<Took> took(std::int64_t segment, std::int64_t device) const = 0;
  // Drops what the execution holds, before its end is reported. With Python's GIL.
  virtual void release() noexcept = 0;

  // The error of the execution: the first that is not the consequence of another.
  const std::exception_ptr& error() const { return error_; }

 private:
  friend class SegmentDispatcher;

  void fail(std::exception_ptr error) noexcept;

  std::shared_ptr<const DispatchPlan> plan_;
  std::shared_ptr<Ticket> done_;
  DispatchCheck check_;
  std::int64_t number_ = -1;           // of the dispatch
  std::vector<std::int64_t> devices_;  // by segment: where it has begun; -1: it has not
  std::vector<bool> observed_;         // by device: whether a segment has begun there
  std::exception_ptr error_;
  bool is_consequence_ = false;  // the error
  bool is_added_ = false;
};

// Begins segments on devices when they are ready and the device is idle.
//
// Which segment begins where is decided by a SegmentDispatch; this class carries that out. What has
// ended is noted by the thread that ended it, and one thread at a time acts on it, without waiting
// for a ticket. Each step is proved by the execution's DispatchCheck before it is taken. The ends
// of executions, which need Python's GIL, are reported by that thread once it no longer acts, so no
// device waits for the GIL.
//
// Owner: shared by its creator, its executions under way and their tickets. Thread: any. No
// method needs the GIL, and `add` must be called without it. Errors: those of an execution go to
// its ticket; an error of the dispatch itself ends all executions with it, the later ones too.
class SegmentDispatcher final : public Woken,
                                public std::enable_shared_from_this<SegmentDispatcher> {
 public:
  // Throws PlanError for a plan whose numbers do not fit.
  explicit SegmentDispatcher(std::shared_ptr<const DispatchPlan> plan);

  // Begins an execution on these devices, by segment, as far as they are idle. Once all lanes are
  // closed, since the interpreter is exiting, its ticket fails at once.
  void add(std::shared_ptr<DispatchedWork> execution, std::vector<std::int64_t> devices);

  // Acts on devices that are late by now.
  void ring() noexcept override;

  // Executions that have not ended, and segments that were given to another device than planned.
  std::int64_t n_under_way() const { return n_under_way_; }
  std::int64_t n_moved() const { return n_moved_; }

  // Processor time of acting, and within it of submissions and of the callbacks of executions that
  // end, in ns, since measuring began. Each reading of the clock takes about half a microsecond, so
  // nothing is measured before.
  struct Measured {
    std::atomic<std::uint64_t> acting_ns = 0, submitting_ns = 0, ending_ns = 0, n_segments = 0;
  };
  void measure() { is_measured_ = true; }
  const Measured& measured() const { return measured_; }

  // In the child of a fork, where the executions of the parent have ended: does nothing any more.
  // Threads of the parent may have been inside it, so it keeps what it holds while executions were
  // under way; another one takes its place.
  void abandon() noexcept;

 private:
  using Execution = std::shared_ptr<DispatchedWork>;

  struct Event {
    enum class Kind : std::uint8_t { kAdded, kSegmentEnded, kCopyEnded, kWoken } kind;
    Execution execution;
    std::int64_t what = 0;              // a segment, or the memory of a copy
    std::vector<std::int64_t> numbers;  // planned devices, or the shared Values of a copy
    std::exception_ptr error;
  };

  void note(Event event) noexcept;
  void act() noexcept;
  void act_on_events(std::vector<Execution>& ended) noexcept;
  bool take(Event& event, bool& is_last, std::vector<Execution>& ended);
  void report(std::vector<Execution> ended) noexcept;
  void report(DispatchedWork& ended) noexcept;
  void handle(Event& event);
  void added(const Execution& execution, const std::vector<std::int64_t>& devices);
  void segment_ended(const Execution& execution, std::int64_t segment, std::exception_ptr error);
  void copy_ended(const Execution& execution, std::int64_t to,
                  const std::vector<std::int64_t>& shared, std::exception_ptr error);
  void step();
  void carry_out(DispatchCommand& command);
  std::shared_ptr<Ticket> begun(DispatchedWork& execution, std::int64_t segment,
                                std::int64_t device);
  std::shared_ptr<Ticket> copied(DispatchedWork& execution, std::int64_t producer, std::int64_t to,
                                 const std::vector<std::int64_t>& shared);
  std::vector<std::int64_t> values_of(const std::vector<std::int64_t>& shared) const;
  void fail(DispatchedWork& execution, std::exception_ptr error);
  void end(const Execution& execution);
  void end_all(const std::exception_ptr& error) noexcept;

  std::shared_ptr<const DispatchPlan> plan_;

  std::mutex mutex_;  // guards events and is_acting; nothing else is done while it is held
  std::deque<Event> events_;
  bool is_acting_ = false;

  // Of the thread that acts.
  SegmentDispatch dispatch_;
  std::map<std::int64_t, Execution> executions_;
  std::vector<Execution> ended_;  // not reported yet
  std::vector<double> present_paces_;
  double armed_at_ns_ = std::numeric_limits<double>::infinity();
  std::exception_ptr broken_;  // the error of the dispatch itself

  std::atomic<std::int64_t> n_under_way_ = 0;
  std::atomic<std::int64_t> n_moved_ = 0;
  std::atomic<bool> is_abandoned_ = false;

  std::atomic<bool> is_measured_ = false;
  Measured measured_;
};

}  // namespace offload
