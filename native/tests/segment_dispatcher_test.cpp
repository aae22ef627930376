#include "offload/segment_dispatcher.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"

// Stand-in devices and links end on threads of their own; memory is an array of plain integers, so
// that the sanitizer of threads sees each access that nothing orders.
namespace {

using offload::DispatchedWork;
using offload::DispatchPlan;
using offload::Lane;
using offload::SegmentDispatcher;
using offload::Ticket;
using offload::test::throws;

constexpr std::int64_t kPoison = -1'000'000'007;

std::size_t at(std::int64_t number) { return static_cast<std::size_t>(number); }

// Of a whole test: what fails, and how often. One in `n` draws; 0: none.
struct Faults {
  unsigned bind = 0, launch = 0, copy = 0, link = 0, cancel = 0, stall = 0;
};

// Told by its type alone: the library's count of references to an exception orders its end behind
// its readers, which the sanitizer of threads does not see.
class Injected : public std::exception {};

// Devices and links, each with a thread.
struct Machine {
  Machine(std::size_t n_devices, std::size_t n_memories, Faults all)
      : devices(n_devices), links(n_memories * n_memories), faults(all) {}

  std::vector<Lane> devices;
  std::vector<Lane> links;
  const Faults faults;
};

// Value 0 is the caller's; segment n makes Value n + 1.
std::int64_t made(std::int64_t segment, const std::vector<std::int64_t>& inputs) {
  std::int64_t sum = segment + 1;
  for (const std::int64_t one : inputs) sum = (31 * sum + one) % 1'000'003;
  return sum;
}

class Work final : public DispatchedWork {
 public:
  Work(std::shared_ptr<const DispatchPlan> plan, std::shared_ptr<Ticket> done, Machine& machine,
       std::int64_t input, unsigned seed)
      : DispatchedWork(plan, std::move(done)),
        plan_(std::move(plan)),
        machine_(machine),
        values_(plan_->rules.names.size() * plan_->rules.n_memories, kPoison),
        n_readers_(plan_->rules.names.size(), 0),
        draw_(seed) {
    value(0, plan_->graph.home) = input;
    for (const auto& one : plan_->rules.inputs) {
      for (const std::int64_t read : one) ++n_readers_[at(read)];
    }
  }

  std::int64_t& value(std::int64_t number, std::int64_t memory) {
    return values_[at(number) * plan_->rules.n_memories + at(memory)];
  }

  void bind(std::int64_t, std::int64_t) override {
    if (is_due(machine_.faults.bind)) throw Injected();
  }

  std::shared_ptr<Ticket> submit(std::int64_t segment, std::int64_t device) override {
    auto ticket = std::make_shared<Ticket>();
    const std::int64_t memory = plan_->graph.memory_of[at(device)];
    machine_.devices[at(device)].submit(
        [this, segment, memory, fails = is_due(machine_.faults.launch),
         stalls = is_due(machine_.faults.stall)] {
          if (stalls) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          if (fails) throw Injected();
          std::vector<std::int64_t> inputs;
          for (const std::int64_t one : plan_->rules.inputs[at(segment)]) {
            inputs.push_back(value(one, memory));
          }
          value(segment + 1, memory) = made(segment, inputs);
        },
        ticket);
    if (is_due(machine_.faults.cancel)) ticket->cancel();
    return ticket;
  }

  std::shared_ptr<Ticket> copy(std::int64_t, std::int64_t origin, std::int64_t target,
                               const std::vector<std::int64_t>& values) override {
    if (is_due(machine_.faults.copy)) throw Injected();
    auto ticket = std::make_shared<Ticket>();
    machine_.links[at(origin) * plan_->rules.n_memories + at(target)].submit(
        [this, origin, target, values, fails = is_due(machine_.faults.link)] {
          if (fails) throw Injected();
          for (const std::int64_t one : values) value(one, target) = value(one, origin);
        },
        ticket);
    return ticket;
  }

  // Called when a segment has ended: overwrites what no segment, and not the caller, reads from now
  // on. A copy may be under way to a memory in which nobody reads any more, so not what was copied.
  std::optional<Took> took(std::int64_t segment, std::int64_t) const override {
    if (plan_->rules.n_memories == 1) {
      auto& self = const_cast<Work&>(*this);
      const auto& returned = plan_->rules.returned;
      for (const std::int64_t one : plan_->rules.inputs[at(segment)]) {
        if (--self.n_readers_[at(one)] > 0) continue;
        if (std::find(returned.begin(), returned.end(), one) == returned.end()) {
          self.value(one, 0) = kPoison;
        }
      }
    }
    return Took{20'000, 20'000.0 * static_cast<double>(1 + segment % 3)};
  }

  void release() noexcept override {
    const auto& returned = plan_->rules.returned;
    for (std::size_t one = 0; one < n_readers_.size(); ++one) {
      const auto number = static_cast<std::int64_t>(one);
      if (std::find(returned.begin(), returned.end(), number) != returned.end()) continue;
      for (std::size_t memory = 0; memory < plan_->rules.n_memories; ++memory) {
        value(number, static_cast<std::int64_t>(memory)) = kPoison;
      }
    }
  }

 private:
  bool is_due(unsigned one_in) { return one_in != 0 && draw_() % one_in == 0; }

  std::shared_ptr<const DispatchPlan> plan_;
  Machine& machine_;
  std::vector<std::int64_t> values_;
  std::vector<std::size_t> n_readers_;
  std::minstd_rand draw_;
};

// A random graph: each segment reads earlier Values, and the caller the last and another one.
std::shared_ptr<DispatchPlan> drawn_plan(std::size_t n_devices, std::size_t n_memories,
                                         unsigned seed) {
  std::minstd_rand draw(seed);
  auto plan = std::make_shared<DispatchPlan>();
  const std::size_t n_segments = 4 + draw() % 6;
  offload::SegmentGraph& graph = plan->graph;
  graph.n_devices = n_devices;
  graph.hand_over_ns = 5'000;
  for (std::size_t device = 0; device < n_devices; ++device) {
    graph.memory_of.push_back(static_cast<std::int64_t>(device % n_memories));
  }
  graph.links.assign(n_memories * n_memories, {5'000, 1e9});
  graph.values.push_back({offload::kCaller, 8, {}, false});
  for (std::size_t segment = 0; segment < n_segments; ++segment) {
    std::vector<std::int64_t> read;
    for (int time = 0; time < 2; ++time) {
      read.push_back(static_cast<std::int64_t>(draw() % (segment + 1)));
    }
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    graph.after.emplace_back();
    for (const std::int64_t one : read) {
      graph.values[at(one)].readers.push_back(static_cast<std::int64_t>(segment));
      if (one > 0) graph.after.back().push_back(one - 1);
    }
    const auto number = static_cast<std::int64_t>(segment);
    graph.values.push_back({number, 8, {}, segment + 1 == n_segments || segment == 1});
    for (std::size_t device = 0; device < n_devices; ++device) {
      graph.costs_ns.push_back(10'000 + static_cast<double>(draw() % 30'000));
    }
    plan->rules.inputs.push_back(read);
    plan->rules.outputs.push_back({number + 1});
  }
  plan->rules.after = graph.after;
  plan->rules.returned = {2, static_cast<std::int64_t>(n_segments)};
  plan->rules.n_memories = n_memories;
  for (std::size_t value = 0; value <= n_segments; ++value) {
    plan->rules.names.push_back(static_cast<std::int64_t>(value));
    plan->shared.push_back({static_cast<std::int64_t>(value)});
  }
  plan->paces = std::make_shared<offload::DevicePaces>(std::vector<double>(n_devices, 1.0));
  plan->with_gil = plan->without_gil = [](const std::function<void()>& function) { function(); };
  return plan;
}

bool is_right(Work& work, const DispatchPlan& plan, std::int64_t input) {
  std::vector<std::int64_t> values{input};
  for (std::size_t segment = 0; segment < plan.rules.inputs.size(); ++segment) {
    std::vector<std::int64_t> inputs;
    for (const std::int64_t one : plan.rules.inputs[segment]) inputs.push_back(values[at(one)]);
    values.push_back(made(static_cast<std::int64_t>(segment), inputs));
  }
  return std::all_of(plan.rules.returned.begin(), plan.rules.returned.end(), [&](std::int64_t one) {
    return work.value(one, plan.graph.home) == values[at(one)];
  });
}

bool was_injected(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const offload::CancelledError&) {
    return true;
  } catch (const Injected&) {
    return true;
  } catch (...) {
    return false;
  }
}

struct Counts {
  std::atomic<int> n_right = 0, n_injected = 0, n_wrong = 0;
};

void count(Counts& counts, Work& work, const DispatchPlan& plan, const Ticket& done,
           std::int64_t input) {
  if (const std::exception_ptr error = done.error()) {
    ++(was_injected(error) ? counts.n_injected : counts.n_wrong);
  } else {
    ++(is_right(work, plan, input) ? counts.n_right : counts.n_wrong);
  }
}

// Three threads, with up to `depth` executions of each under way.
void many_threads(std::size_t n_devices, std::size_t n_memories, unsigned seed, Faults faults,
                  Counts& counts, int n_executions, std::size_t depth) {
  const auto plan = drawn_plan(n_devices, n_memories, seed);
  Machine machine(n_devices, n_memories, faults);
  const auto dispatcher = std::make_shared<SegmentDispatcher>(plan);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      struct Begun {
        std::shared_ptr<Work> work;
        std::shared_ptr<Ticket> done;
        std::int64_t input;
      };
      std::deque<Begun> begun;
      const auto take = [&] {
        begun.front().done->await_end();
        count(counts, *begun.front().work, *plan, *begun.front().done, begun.front().input);
        begun.pop_front();
      };
      for (int number = 0; number < n_executions; ++number) {
        const std::int64_t input = 1000 * thread + number;
        auto done = std::make_shared<Ticket>();
        done->begin();
        auto work = std::make_shared<Work>(plan, done, machine, input,
                                           seed * 7919 + static_cast<unsigned>(input));
        begun.push_back({work, done, input});
        plan->paces->begin_execution();
        std::vector<std::int64_t> devices;
        for (std::size_t segment = 0; segment < plan->rules.inputs.size(); ++segment) {
          devices.push_back(static_cast<std::int64_t>((segment + at(input)) % n_devices));
        }
        dispatcher->add(std::move(work), std::move(devices));
        if (begun.size() >= depth) take();
      }
      while (!begun.empty()) take();
    });
  }
  for (std::thread& one : threads) one.join();
  CHECK_THAT(dispatcher->n_under_way() == 0);
  CHECK_THAT(plan->paces->n_under_way() == 0);
}

void results_are_those_of_one_device() {
  Counts counts;
  for (unsigned seed = 0; seed < 4; ++seed) {
    many_threads(2 + seed % 3, 1 + seed % 2, seed, {}, counts, 40, 1 + 4 * seed);
  }
  CHECK_THAT(counts.n_right == 4 * 3 * 40);
}

// Devices stall, so that the alarm's thread acts too.
void what_waits_for_a_late_device_moves() {
  Counts counts;
  Faults faults;
  faults.stall = 6;
  for (unsigned seed = 10; seed < 14; ++seed) {
    many_threads(3, 1 + seed % 3, seed, faults, counts, 12, 4);
  }
  CHECK_THAT(counts.n_right == 4 * 3 * 12);
}

void an_error_is_that_of_its_execution() {
  Counts counts;
  const Faults each[] = {{30, 0, 0, 0, 0, 0}, {0, 30, 0, 0, 0, 0}, {0, 0, 15, 0, 0, 0},
                         {0, 0, 0, 15, 0, 0}, {0, 0, 0, 0, 15, 0}, {60, 60, 60, 60, 60, 20}};
  unsigned seed = 20;
  for (const Faults& faults : each) many_threads(3, 2, seed++, faults, counts, 40, 6);
  CHECK_THAT(counts.n_wrong == 0);
  CHECK_THAT(counts.n_right + counts.n_injected == 6 * 3 * 40);
  CHECK_THAT(counts.n_right > 0 && counts.n_injected > 0);
}

// An error of the dispatch itself: a plan that the graph does not allow.
void a_wrong_plan_is_an_error_of_its_execution() {
  const auto plan = drawn_plan(2, 1, 1);
  Machine machine(2, 1, {});
  const auto dispatcher = std::make_shared<SegmentDispatcher>(plan);
  const auto done = std::make_shared<Ticket>();
  plan->paces->begin_execution();
  dispatcher->add(std::make_shared<Work>(plan, done, machine, 1, 1), {0, 1});
  done->await_end();
  CHECK_THAT(throws<offload::PlanError>([&] { done->wait(); }));
  CHECK_THAT(dispatcher->n_under_way() == 0);
}

// As where Ctrl-C interrupts a submission.
void work_that_was_never_added_has_failed() {
  const auto plan = drawn_plan(2, 1, 1);
  Machine machine(2, 1, {});
  const auto done = std::make_shared<Ticket>();
  int n_calls = 0;
  done->when_done([&n_calls] { ++n_calls; });
  std::make_shared<Work>(plan, done, machine, 1, 1).reset();
  CHECK_THAT(done->done() && done->error() && n_calls == 1);
}

// Callbacks of executions, which run on any of the threads, submit the next ones.
void callbacks_submit() {
  const auto plan = drawn_plan(3, 2, 5);
  Machine machine(3, 2, {});
  const auto dispatcher = std::make_shared<SegmentDispatcher>(plan);
  Counts counts;
  const auto last = std::make_shared<Ticket>();
  std::function<void(int)> submit = [&](int n_left) {
    const auto done = std::make_shared<Ticket>();
    const auto work =
        std::make_shared<Work>(plan, done, machine, n_left, static_cast<unsigned>(n_left));
    done->when_done([&, n_left, work, last, ended = done.get()] {
      count(counts, *work, *plan, *ended, n_left);
      if (n_left == 0) return last->finish(nullptr);
      submit(n_left - 1);
    });
    plan->paces->begin_execution();
    dispatcher->add(work, std::vector<std::int64_t>(plan->rules.inputs.size(), n_left % 3));
  };
  submit(60);
  last->wait();
  CHECK_THAT(counts.n_right == 61);
}

// A dispatcher whose owner has dropped it goes on while executions are under way.
void a_dropped_dispatcher_ends_its_executions() {
  const auto plan = drawn_plan(2, 2, 6);
  Machine machine(2, 2, {});
  auto dispatcher = std::make_shared<SegmentDispatcher>(plan);
  const std::weak_ptr<SegmentDispatcher> alive = dispatcher;
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int number = 0; number < 30; ++number) {
    tickets.push_back(std::make_shared<Ticket>());
    plan->paces->begin_execution();
    dispatcher->add(std::make_shared<Work>(plan, tickets.back(), machine, number, 1u),
                    std::vector<std::int64_t>(plan->rules.inputs.size(), number % 2));
  }
  dispatcher.reset();
  for (const auto& one : tickets) one->wait();
  for (Lane& one : machine.devices) one.close();
  for (Lane& one : machine.links) one.close();
  const std::uint64_t begin_ns = offload::now_ns();
  while (!alive.expired() && offload::now_ns() < begin_ns + 5'000'000'000) {
    std::this_thread::yield();
  }
  CHECK_THAT(alive.expired());
}

// Last of all: no lane of this process works afterwards.
void nothing_begins_once_lanes_are_closed() {
  const auto plan = drawn_plan(2, 1, 7);
  Machine machine(2, 1, {});
  const auto dispatcher = std::make_shared<SegmentDispatcher>(plan);
  const auto done = std::make_shared<Ticket>();
  plan->paces->begin_execution();
  Lane::close_all();
  dispatcher->add(std::make_shared<Work>(plan, done, machine, 1, 1u),
                  std::vector<std::int64_t>(plan->rules.inputs.size(), 0));
  CHECK_THAT(done->done() && done->error() && dispatcher->n_under_way() == 0);
}

}  // namespace

int main() {
  results_are_those_of_one_device();
  what_waits_for_a_late_device_moves();
  an_error_is_that_of_its_execution();
  a_wrong_plan_is_an_error_of_its_execution();
  work_that_was_never_added_has_failed();
  callbacks_submit();
  a_dropped_dispatcher_ends_its_executions();
  nothing_begins_once_lanes_are_closed();
  return offload::test::result();
}
