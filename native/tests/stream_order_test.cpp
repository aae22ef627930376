#include "device/stream_order.hpp"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using offload::test::error_of;
enum Code { kDone = 0, kRefused = 1, kFault = 2 };

// Streams whose work is a count, done once it is waited for; the next call of a name may fail.
class Machine {
 public:
  Code call(const std::string& name) {
    const std::lock_guard lock(mutex);
    ++calls[name];
    const auto found = failures.find(name);
    if (found == failures.end()) return kDone;
    const Code code = found->second;
    failures.erase(found);
    return code;
  }

  int count(const std::string& name) {
    const std::lock_guard lock(mutex);
    return calls[name];
  }

  std::mutex mutex;
  std::map<std::string, int> calls;
  std::map<std::string, Code> failures;  // once each
  int captured = 0;                      // the stream; 0: none
  bool may_join = false;                 // work may become part of a capture
  int events = 0;                        // alive
};

struct FakeStreams {
  using Stream = int;
  using Code = ::Code;
  static constexpr Code kSuccess = kDone;

  class Event {
   public:
    explicit Event(const FakeStreams& streams) : machine_(streams.machine) {
      if (machine_.call("create") != kDone) throw std::runtime_error("making an event");
      const std::lock_guard lock(machine_.mutex);
      ++machine_.events;
    }
    ~Event() {
      const std::lock_guard lock(machine_.mutex);
      --machine_.events;
    }

   private:
    Machine& machine_;
  };
  struct Scope {
    explicit Scope(const FakeStreams&) {}
  };
  using RelaxedScope = Scope;

  Code record(const Event&, Stream) const { return machine.call("record"); }
  Code wait(Stream, const Event&) const { return machine.call("wait"); }
  Code synchronize(const Event&) const { return machine.call("synchronize event"); }
  Code synchronize(Stream) const { return machine.call("synchronize stream"); }
  Code ask_capturing(Stream stream, bool& captures) const {
    captures = stream == machine.captured;
    return machine.call("ask");
  }
  void refuse_capturing(Stream stream, const char* which) const {
    if (stream == machine.captured) throw std::runtime_error(which);
  }
  bool joins_capture(Stream stream, bool) const {
    if (!machine.may_join) refuse_capturing(stream, "the current stream");
    return stream == machine.captured;
  }
  void check(Code code, const char* what) const {
    if (code != kDone) throw std::runtime_error(what);
  }
  static bool is_fault(Code code) { return code == kFault; }
  static bool is_lost() { return false; }

  Machine& machine;
};

using Order = offload::StreamOrder<FakeStreams>;

void another_stream_waits_for_the_last() {
  Machine machine;
  Order order(FakeStreams{machine});
  CHECK_THAT(order.fence() == nullptr);
  order.enter(1);
  order.enter(1);
  CHECK_THAT(machine.count("wait") == 0);
  order.enter(2);
  CHECK_THAT(machine.count("record") == 1 && machine.count("wait") == 1);
  CHECK_THAT(*order.busy_stream() == 2);
  order.fence()->wait();
  CHECK_THAT(!order.in_flight() && order.busy_stream() == nullptr);
  order.enter(3);
  CHECK_THAT(machine.count("wait") == 1);
}

void a_fence_ends_what_came_before_it() {
  Machine machine;
  Order order(FakeStreams{machine});
  order.enter(1);
  const auto early = order.fence();
  order.note_enqueued();
  const auto late = order.fence();
  early->wait();
  CHECK_THAT(order.in_flight());
  late->wait();
  CHECK_THAT(!order.in_flight());
  early->wait();  // and does not lower the count
  CHECK_THAT(!order.in_flight());
}

void a_wait_that_fails_ends_nothing() {
  for (const Code code : {kRefused, kFault}) {
    Machine machine;
    Order order(FakeStreams{machine});
    order.enter(1);
    const auto fence = order.fence();
    machine.failures["synchronize event"] = code;
    CHECK_THAT(error_of<std::runtime_error>([&] { fence->wait(); }) == "executing the program");
    CHECK_THAT(order.in_flight());
    CHECK_THAT(order.take_failure());
    CHECK_THAT(!order.take_failure());
    fence->wait();
    CHECK_THAT(!order.in_flight());
  }
}

void a_fence_that_cannot_be_made_waits_for_the_stream() {
  Machine machine;
  Order order(FakeStreams{machine});
  order.enter(1);
  machine.failures["record"] = kRefused;
  machine.failures["synchronize stream"] = kRefused;
  CHECK_THAT(error_of<std::runtime_error>([&] { order.fence(); }) == "ending an execution");
  CHECK_THAT(order.in_flight());
  machine.failures["record"] = kRefused;
  CHECK_THAT(error_of<std::runtime_error>([&] { order.fence(); }) == "ending an execution");
  CHECK_THAT(!order.in_flight());
  CHECK_THAT(order.take_failure());
  order.note_enqueued();
  machine.failures["create"] = kRefused;
  CHECK_THAT(error_of<std::runtime_error>([&] { order.fence(); }) == "making an event");
  CHECK_THAT(!order.in_flight());
}

void nobody_waits_for_a_captured_stream() {
  Machine machine;
  Order order(FakeStreams{machine});
  order.enter(1);
  machine.captured = 1;
  CHECK_THAT(error_of<std::runtime_error>([&] { order.fence(); }) ==
             "the stream of the execution before");
  CHECK_THAT(error_of<std::runtime_error>([&] { order.enter(1); }) == "the current stream");
  CHECK_THAT(error_of<std::runtime_error>([&] { order.enter(2); }) ==
             "the stream of the execution before");
  CHECK_THAT(!order.end());
  CHECK_THAT(machine.count("record") == 0 && order.in_flight());
  machine.captured = 0;
  CHECK_THAT(order.end());
  CHECK_THAT(!order.in_flight() && machine.events == 0);
  CHECK_THAT(order.end());
  CHECK_THAT(machine.count("record") == 1);
}

void work_of_a_capture_waits_for_none_and_is_not_in_flight() {
  Machine machine;
  machine.may_join = true;
  Order order(FakeStreams{machine});
  order.enter(1);
  machine.captured = 2;
  order.enter(2);
  order.note_enqueued();
  CHECK_THAT(order.stream() == 2 && *order.busy_stream() == 1);
  CHECK_THAT(machine.count("record") == 0 && machine.count("wait") == 0);
  order.fence()->wait();
  CHECK_THAT(!order.in_flight());
  order.enter(2);
  order.note_enqueued();
  CHECK_THAT(!order.in_flight());
  machine.captured = 0;
  order.enter(3);
  CHECK_THAT(*order.busy_stream() == 3 && machine.count("wait") == 0);
}

void a_refused_wait_is_no_end_and_a_fault_is() {
  for (const char* const name : {"ask", "record", "synchronize event"}) {
    Machine machine;
    Order order(FakeStreams{machine});
    order.enter(1);
    machine.failures[name] = kRefused;
    machine.failures["synchronize stream"] = kRefused;
    CHECK_THAT(!order.end());
    CHECK_THAT(order.in_flight());
    machine.failures[name] = kRefused;
    CHECK_THAT(order.end());  // the stream itself could be waited for
    CHECK_THAT(!order.in_flight());
  }
  for (const char* const name : {"ask", "record", "synchronize event"}) {
    Machine machine;
    Order order(FakeStreams{machine});
    order.enter(1);
    machine.failures[name] = kFault;
    machine.failures["synchronize stream"] = kRefused;
    CHECK_THAT(order.end());
    CHECK_THAT(!order.in_flight());
  }
}

void fences_outlive_the_order_and_wait_on_other_threads() {
  Machine machine;
  std::vector<std::thread> threads;
  {
    Order order(FakeStreams{machine});
    for (int execution = 0; execution < 200; ++execution) {
      order.enter(1 + execution % 2);
      std::shared_ptr<offload::Fence> fence = order.fence();
      if (execution % 20 != 0) continue;
      threads.emplace_back([fence] { fence->wait(); });
    }
    const auto last = order.fence();
    std::thread waiter([&] { last->wait(); });
    while (order.in_flight()) std::this_thread::yield();
    waiter.join();
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  CHECK_THAT(machine.events == 0);
}

}  // namespace

int main() {
  another_stream_waits_for_the_last();
  a_fence_ends_what_came_before_it();
  a_wait_that_fails_ends_nothing();
  a_fence_that_cannot_be_made_waits_for_the_stream();
  nobody_waits_for_a_captured_stream();
  work_of_a_capture_waits_for_none_and_is_not_in_flight();
  a_refused_wait_is_no_end_and_a_fault_is();
  fences_outlive_the_order_and_wait_on_other_threads();
  return offload::test::result();
}
