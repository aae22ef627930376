// Streams: queues whose work runs late, when the host waits for it, and in order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "graphs.hpp"
#include "registry.hpp"
#include "status.hpp"
#include "work.hpp"

namespace simulator {

struct Capture;
struct Stream;

// A place in a stream. `stream` counts only until it is done.
struct Mark {
  bool done = false;
  std::int64_t at_ns = 0;
  Stream* stream = nullptr;
};

struct Record {
  std::shared_ptr<Mark> mark;
};
struct Wait {
  std::shared_ptr<Mark> mark;
};
// Blocks the stream until it is open. Queried under the device's mutex, possibly often.
struct Gate {
  std::function<bool()> is_open;
  // When it was opened, on the virtual clock; empty: unknown.
  std::function<std::int64_t()> opened_ns = nullptr;
};
using Operation = std::variant<Work, GraphRun, Record, Wait, Gate>;

struct Stream {
  std::uint64_t handle = 0;
  bool blocking = true;  // ordered with the default stream
  std::deque<Operation> queue;
  bool advancing = false;               // its first operation is in progress
  std::shared_ptr<Capture> capture;     // while it captures
  std::vector<std::uint64_t> frontier;  // nodes that the next one depends on
  std::int64_t now_ns = 0;              // on the virtual clock: the end of its executed work
  std::int64_t told_ns = 0;             // the host's time that the queue knows
};

// Durations by which a device measures time, independent of the order and time in which the
// simulation runs its work: an operation begins when everything that it waits for has ended, and
// not before the host enqueued it. The host's time advances during waits.
struct VirtualClock {
  std::int64_t kernel_ns = 0;
  std::int64_t copy_ns = 0;
  std::map<std::uint64_t, std::int64_t> copy_to_ns;  // by the destination address
};

struct Event {
  std::uint64_t handle = 0;
  bool timed = true;
  std::shared_ptr<Mark> mark;        // null: never recorded
  std::shared_ptr<Capture> capture;  // where it was last recorded, if a stream captured then
  std::vector<std::uint64_t> frontier;
};

// True on a thread inside a kernel or host function: it may not call the device.
bool is_inside_work();

// Owner: the device. Thread: under the device's mutex, which is free while kernels and host
// functions run; one thread at a time runs work, others that need work run wait for it.
class Scheduler : private Runner {
 public:
  Scheduler(std::mutex& device, Memory& memory, Graphs& graphs);

  std::shared_ptr<Stream> create(bool blocking);
  void remove(std::uint64_t handle) { streams_.remove(handle); }
  // 0 and 1 are the default stream, 2 the thread's own. Errors: kInvalidHandle.
  std::shared_ptr<Stream> get(std::uint64_t handle) const;
  bool is_default(const Stream& stream) const { return &stream == default_.get(); }
  std::vector<std::shared_ptr<Stream>> all() const;

  // Enqueues work ordered after the stream's work; on the default stream also after all blocking
  // streams' work, and on a blocking one after the default stream's.
  void enqueue(Stream& stream, Operation operation);
  std::shared_ptr<Mark> record(Stream& stream);
  void wait(Stream& stream, std::shared_ptr<Mark> mark);

  // No work is queued on the stream; for the default stream, on any that is ordered with it.
  bool is_idle(const Stream& stream) const;
  // Runs everything queued on the stream, up to the mark, or on all streams. The default stream
  // waits for those that are ordered with it. Errors: the fault that a kernel or an address caused,
  // which is sticky; kBlocked, which is not, where a gate stays closed whatever other streams do.
  void run(const std::shared_ptr<Stream>& stream);
  void run_until(const std::shared_ptr<Mark>& mark);
  void run_all();

  // The nth copy from now (1: the next) faults instead.
  void fault_copy(std::uint64_t nth) { copies_to_fault_ = nth; }
  // Bytes of copies from the host that have run.
  std::uint64_t bytes_from_host() const { return bytes_from_host_; }

  // The sticky fault of the device, if there is one.
  std::optional<Status> fault() const { return fault_; }
  void set_fault(Status status);
  void clear_fault() { fault_.reset(); }
  // Discards queued work; nothing waits for it any more.
  void drop(Stream& stream);
  bool is_executing() const { return executing_; }
  void set_eager(bool eager);

  // From here on the device uses this clock, not the machine's.
  void set_clock(VirtualClock clock) { clock_ = std::move(clock); }
  void set_copy_ns(std::uint64_t to, std::int64_t duration_ns);
  bool has_clock() const { return clock_.has_value(); }
  // The host's time on it, and the host time of a call.
  std::int64_t host_ns() const { return host_ns_; }
  void host_takes(std::int64_t duration_ns) {
    if (clock_) host_ns_ += duration_ns;
  }
  // Whether some stream has work that has not ended.
  bool is_busy() const { return n_queued() != 0; }

  // Which streams run first while one waits at a gate.
  void set_newest_first(bool newest) { newest_first_ = newest; }

  std::size_t size() const { return streams_.size(); }
  // Drops all work and streams. Errors: kNotReady while work runs.
  void reset();

 private:
  class Execution;

  void advance(Stream& stream, const Mark* until);
  // Runs the first operation, of a graph the next node. False where it would wait for something
  // that does not happen.
  bool step(Stream& stream);
  void perform_first(Stream& stream);
  bool pass(Stream& stream);
  bool open(const Gate& gate);
  bool step_any(bool waiting);
  std::size_t n_queued() const;
  bool advance_graph(Stream& stream, GraphRun& run);
  void perform(Stream& stream, const Operation& operation);
  std::int64_t duration_ns(const Work& work) const;
  std::int64_t read_clock(std::int64_t virtual_ns) const;
  void tell_time(Stream& stream);
  void host_saw(std::int64_t moment_ns);
  void perform(const Work& work) override;
  std::int64_t stream_ns() const override { return current_ == nullptr ? 0 : current_->now_ns; }
  void fail(Status status) override { fault_ = status; }
  void perform(const BlockKernelCall& call);
  void perform(const GraphRun& run);
  void perform(const Step& step);
  std::shared_ptr<Mark> tail(Stream& stream);
  void drop_all();

  std::mutex& device_;
  Memory& memory_;
  Graphs& graphs_;
  Registry<Stream> streams_;
  std::shared_ptr<Stream> default_, thread_default_;
  std::condition_variable_any ended_;
  bool executing_ = false;
  std::uint64_t copies_to_fault_ = 0;  // 0: none will
  std::uint64_t bytes_from_host_ = 0;
  bool eager_ = false;
  bool newest_first_ = false;
  std::optional<VirtualClock> clock_;
  std::int64_t host_ns_ = 0;   // on the virtual clock
  Stream* current_ = nullptr;  // whose current operation is not a graph's
  std::optional<Status> fault_;
};

}  // namespace simulator
