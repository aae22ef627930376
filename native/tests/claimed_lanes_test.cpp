#include "offload/claimed_lanes.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "children.hpp"
#include "core/woken_elsewhere.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"

namespace {

using offload::ClaimedLanes;
using offload::Helpers;
using offload::LaneStep;
using offload::LaneWork;
using offload::test::error_of;
using offload::test::status_of;
using offload::test::throws;

constexpr auto kRun = LaneStep::Kind::kRun;
constexpr auto kRecord = LaneStep::Kind::kRecord;
constexpr auto kWait = LaneStep::Kind::kWait;

using Lanes = std::vector<std::vector<LaneStep>>;

void pause_for(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// A random program on random lanes: launch l reads plain memory of earlier launches and writes its
// own. Each conflict between lanes has an event, so that the sanitizer sees accesses without order.
struct Program {
  std::vector<std::vector<std::size_t>> reads;
  std::vector<std::uint64_t> expected;
  Lanes lanes;
};

Program random_program(std::size_t n_launches, std::size_t n_lanes, unsigned seed) {
  std::mt19937 draw(seed);
  Program made;
  std::vector<std::size_t> lane_of;
  made.lanes.resize(n_lanes);
  std::set<std::size_t> recorded;
  for (std::size_t launch = 0; launch < n_launches; ++launch) {
    lane_of.push_back(launch < n_lanes ? launch : draw() % n_lanes);
    auto& reads = made.reads.emplace_back();
    for (auto n_reads = draw() % 3; launch > 0 && n_reads > 0; --n_reads) {
      reads.push_back(launch - 1 - draw() % std::min<std::size_t>(launch, 8));
      recorded.insert(reads.back());
    }
  }
  for (std::size_t launch = 0; launch < n_launches; ++launch) {
    auto& lane = made.lanes[lane_of[launch]];
    std::uint64_t sum = launch;
    for (const std::size_t read : made.reads[launch]) {
      sum = sum * 31 + made.expected[read];
      if (lane_of[read] != lane_of[launch]) lane.push_back({kWait, read, 0});
    }
    made.expected.push_back(sum);
    lane.push_back({kRun, launch, launch + 1});
    if (recorded.count(launch) != 0) lane.push_back({kRecord, launch, 0});
  }
  return made;
}

class Work final : public LaneWork {
 public:
  explicit Work(Program program) : program_(std::move(program)), found_(program_.reads.size()) {}

  void run(std::size_t, std::size_t& launch, std::size_t last,
           const std::atomic<bool>& stopped) override {
    for (; launch < last && !stopped; ++launch) {
      if (failing.count(launch) != 0) throw std::runtime_error(std::to_string(launch));
      if (pause_us > 0 && launch % 7 == 0) pause_for(pause_us);
      std::uint64_t sum = launch + round;
      for (const std::size_t read : program_.reads[launch]) sum = sum * 31 + found_[read];
      found_[launch] = sum;
      ++n_run;
    }
  }

  void take_part(const std::function<void()>& drive) override {
    if (refuses) throw std::bad_alloc();
    ++n_parts;
    drive();
  }

  bool is_right() const { return found_ == program_.expected; }
  void forget() { found_.assign(found_.size(), 0); }

  std::set<std::size_t> failing;
  int pause_us = 0;
  std::uint64_t round = 0;
  bool refuses = false;
  std::atomic<int> n_parts = 0;
  std::atomic<std::size_t> n_run = 0;

 private:
  Program program_;
  std::vector<std::uint64_t> found_;  // no lock: lanes order accesses
};

struct Made {
  explicit Made(Program program)
      : n_launches(program.reads.size()),
        lanes(program.lanes),
        work(std::move(program)),
        claimed(std::make_shared<ClaimedLanes>(work, lanes)) {}

  void execute_right(std::size_t n_helpers) {
    work.forget();
    work.n_run = 0;
    claimed->execute(n_helpers);
    CHECK_THAT(work.is_right());
    CHECK_THAT(work.n_run == n_launches);
  }

  std::size_t n_launches;
  Lanes lanes;
  Work work;
  std::shared_ptr<ClaimedLanes> claimed;
};

void no_helper_is_needed() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Made made(random_program(100, 1 + seed % 5, seed));
    for (int time = 0; time < 5; ++time) made.execute_right(0);
    CHECK_THAT(made.claimed->n_helped() == 0);
  }
  CHECK_THAT(Helpers::instance().n_started() == 0);  // and none was started
}

void helpers_take_part() {
  std::uint64_t n_helped = 0;
  for (unsigned seed = 0; seed < 30; ++seed) {
    Made made(random_program(60, 2 + seed % 4, seed));
    for (int time = 0; time < 60; ++time) {
      made.work.pause_us = time % 10 == 0 ? 20 : 0;
      if (time % 20 == 19) pause_for(500);  // long enough for helpers to fall asleep
      made.execute_right(made.lanes.size() - 1);
    }
    n_helped += made.claimed->n_helped();
  }
  CHECK_THAT(n_helped > 0);
  CHECK_THAT(Helpers::instance().n_started() == 4);
}

// Work whose launches know whether a helper runs them.
class OfHelpers : public LaneWork {
 public:
  void take_part(const std::function<void()>& drive) override {
    is_helper = true;
    drive();
    is_helper = false;
  }

  static thread_local bool is_helper;
};

thread_local bool OfHelpers::is_helper = false;

// Two launches on two lanes, of which one asks what its thread helps with.
class Asking final : public OfHelpers {
 public:
  void run(std::size_t, std::size_t& launch, std::size_t last, const std::atomic<bool>&) override {
    pause_for(100);  // a helper claims the other lane
    if (is_helper) {
      CHECK_THAT(ClaimedLanes::is_helping_with(this));
      CHECK_THAT(!ClaimedLanes::is_helping_with(&another));
    } else {
      CHECK_THAT(!ClaimedLanes::is_helping_with(this));
    }
    CHECK_THAT(!ClaimedLanes::is_helping_with(nullptr));
    launch = last;
  }

  int another = 0;
};

void a_helper_helps_with_one_execution() {
  Asking work;
  const Lanes lanes{{{kRun, 0, 1}}, {{kRun, 1, 2}}};
  const auto claimed = std::make_shared<ClaimedLanes>(work, lanes, &work);
  for (int time = 0; time < 1000 && claimed->n_helped() < 10; ++time) claimed->execute(1);
  CHECK_THAT(claimed->n_helped() > 0);
}

void several_threads_share_the_helpers() {
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([seed] {
      Made made(random_program(40, 3, seed));
      for (int time = 0; time < 100; ++time) made.execute_right(2);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void a_failure_ends_everything_once() {
  for (unsigned seed = 0; seed < 30; ++seed) {
    Made made(random_program(60, 2 + seed % 3, seed));
    for (int time = 0; time < 20; ++time) {
      made.work.failing = {static_cast<std::size_t>((time * 7 + static_cast<int>(seed)) % 60)};
      if (time % 3 == 0) made.work.failing.insert(59);
      std::string what;
      try {
        made.claimed->execute(3);
      } catch (const std::runtime_error& error) {
        what = error.what();
      }
      CHECK_THAT(!what.empty() && made.work.failing.count(std::stoul(what)) == 1);
      made.work.failing.clear();
      made.execute_right(3);
    }
  }
}

void of_two_failures_the_first_is_told() {
  const Lanes lanes = {{{kRun, 0, 2}}, {{kRun, 2, 4}}};
  Program program{std::vector<std::vector<std::size_t>>(4), {0, 1, 2, 3}, lanes};
  Made made(std::move(program));
  made.work.failing = {1, 3};
  for (int time = 0; time < 50; ++time) {
    std::string what;
    try {
      made.claimed->execute(1);
    } catch (const std::runtime_error& error) {
      what = error.what();
    }
    CHECK_THAT(what == "1" || what == "3");  // 3 if 1 was not begun
  }
}

void a_helper_that_cannot_take_part_gives_its_lane_back() {
  Made made(random_program(60, 2, 1));
  made.work.refuses = true;
  made.work.pause_us = 20;
  for (int time = 0; time < 50; ++time) made.execute_right(1);
  CHECK_THAT(made.claimed->n_helped() == 0);
}

void work_may_go_while_helpers_leave() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Made made(random_program(12, 3, seed));
    made.execute_right(2);
  }
}

void lanes_that_are_wrong_are_refused() {
  struct NoWork final : LaneWork {
    void run(std::size_t, std::size_t&, std::size_t, const std::atomic<bool>&) override {}
    void take_part(const std::function<void()>&) override {}
  } work;
  const std::vector<Lanes> wrong = {
      {},
      {{{kRecord, 0, 0}}, {{kRecord, 0, 0}}},
      {{{kWait, 0, 0}}, {}},
      {{{kRecord, 0, 0}, {kWait, 0, 0}}, {}},
  };
  for (const Lanes& lanes : wrong) {
    bool threw = false;
    try {
      ClaimedLanes claimed(work, lanes);
    } catch (const std::invalid_argument&) {
      threw = true;
    }
    CHECK_THAT(threw);
  }
}

cpu_set_t processors_of(pthread_t thread) {
  cpu_set_t found;
  CHECK_THAT(pthread_getaffinity_np(thread, sizeof(found), &found) == 0);
  return found;
}

void may_use(pthread_t thread, const cpu_set_t& processors) {
  CHECK_THAT(pthread_setaffinity_np(thread, sizeof(processors), &processors) == 0);
}

cpu_set_t only(int processor) {
  cpu_set_t made;
  CPU_ZERO(&made);
  CPU_SET(processor, &made);
  return made;
}

// A thread that sleeps on the processor of the thread that wakes it.
void a_woken_thread_may_not_use_the_processor_of_the_other() {
  const cpu_set_t all = processors_of(pthread_self());
  const int here = sched_getcpu();
  may_use(pthread_self(), only(here));
  for (const bool has_others : {true, false}) {
    offload::WokenElsewhere elsewhere;
    std::atomic<int> step = 0;
    std::thread other([&] {  // on this processor only
      elsewhere.sleeps();
      step = 1;
      while (step != 2) pause_for(10);
      elsewhere.is_awake();
      step = 3;
      while (step != 4) pause_for(10);
    });
    while (step != 1) pause_for(10);
    const cpu_set_t allowed = has_others ? all : only(here);
    may_use(other.native_handle(), allowed);
    elsewhere.will_be_woken();
    cpu_set_t expected = allowed;
    if (CPU_COUNT(&allowed) > 1) CPU_CLR(here, &expected);
    const cpu_set_t excluded = processors_of(other.native_handle());
    CHECK_THAT(CPU_EQUAL(&excluded, &expected));
    step = 2;
    while (step != 3) pause_for(10);
    const cpu_set_t ended = processors_of(other.native_handle());
    CHECK_THAT(CPU_EQUAL(&ended, &allowed));
    step = 4;
    other.join();
  }
  may_use(pthread_self(), all);
}

// Two launches on two lanes: the caller's waits until a helper has begun the other, for at most
// 10 s, and the helper's tells its thread, processor and processors that it may use.
class Placed final : public OfHelpers {
 public:
  void run(std::size_t, std::size_t& launch, std::size_t last, const std::atomic<bool>&) override {
    if (launch == 0) {
      for (int turn = 0; turn < 1'000'000 && !has_begun; ++turn) pause_for(10);
    } else if (is_helper) {
      helper = pthread_self();
      processor = sched_getcpu();
      processors = processors_of(helper);
      has_begun = true;
    }
    launch = last;
  }

  std::atomic<bool> has_begun = false;
  pthread_t helper{};
  int processor = -1;
  cpu_set_t processors{};
};

void a_helper_that_slept_on_the_callers_processor_is_woken_on_another() {
  const cpu_set_t all = processors_of(pthread_self());
  if (CPU_COUNT(&all) < 2) return;
  Placed work;
  const auto claimed =
      std::make_shared<ClaimedLanes>(work, Lanes{{{kRun, 0, 1}}, {{kRun, 1, 2}}}, &work);
  const auto execute = [&] {
    work.has_begun = false;
    claimed->execute(1);
    CHECK_THAT(work.has_begun);
    pause_for(20'000);  // until helpers sleep
  };
  execute();
  const int here = sched_getcpu();
  may_use(pthread_self(), only(here));
  constexpr int kTimes = 10;
  int n_elsewhere = 0;
  for (int time = 0; time < kTimes; ++time) {
    const pthread_t helper = work.helper;
    may_use(helper, only(here));
    execute();
    CHECK_THAT(work.processor == here || !pthread_equal(work.helper, helper));
    may_use(helper, all);
    execute();
    n_elsewhere += work.processor != here;
    CHECK_THAT(CPU_EQUAL(&work.processors, &all));
  }
  CHECK_THAT(n_elsewhere >= kTimes / 2);  // the system may move it back
  may_use(pthread_self(), all);
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
void fork_keeps_helpers_usable() {
  Made made(random_program(60, 3, 3));
  made.execute_right(2);
  const pid_t child = fork();
  if (child == 0) {
    bool right = Helpers::instance().n_started() == 0;
    for (int time = 0; time < 20; ++time) {
      made.work.forget();
      made.claimed->execute(2);
      right = right && made.work.is_right();
    }
    _exit(right && Helpers::instance().n_started() == 2 ? 0 : 1);
  }
  CHECK_THAT(status_of(child) == 0);
  made.execute_right(2);
}

// A launch forks while a helper is in another launch, which never ends in the child.
void a_launch_that_forks_fails_in_the_child() {
  struct Forks final : LaneWork {
    void run(std::size_t, std::size_t& launch, std::size_t last,
             const std::atomic<bool>&) override {
      if (launch == 1) {
        is_helped = true;
        while (!may_end) pause_for(10);
      } else {
        for (int turn = 0; turn < 100'000 && !is_helped; ++turn) pause_for(10);
        child = fork();
        may_end = true;
      }
      launch = last;
    }
    void take_part(const std::function<void()>& drive) override { drive(); }
    std::atomic<bool> is_helped = false;
    std::atomic<bool> may_end = false;
    pid_t child = -1;
  } work;
  const Lanes lanes = {{{kRun, 0, 1}}, {{kRun, 1, 2}}};
  const auto claimed = std::make_shared<ClaimedLanes>(work, lanes);
  const std::string error = error_of<offload::ExecutionError>([&] { claimed->execute(1); });
  if (work.child == 0) _exit(error.find("forked") != std::string::npos ? 0 : 1);
  CHECK_THAT(error.empty());
  CHECK_THAT(status_of(work.child) == 0);
}

// A lane that has ended before the fork has its results in the child too.
void a_launch_that_forks_after_the_other_lane_continues_in_the_child() {
  struct Forks final : LaneWork {
    void run(std::size_t lane, std::size_t& launch, std::size_t last,
             const std::atomic<bool>&) override {
      if (launch == 0) {
        for (int turn = 0; turn < 100'000 && n_other == 0; ++turn) pause_for(10);
        pause_for(20'000);  // until the lane has ended as well
        child = fork();
      } else {
        n_other += lane == 1;
      }
      launch = last;
    }
    void take_part(const std::function<void()>& drive) override { drive(); }
    std::atomic<int> n_other = 0;
    pid_t child = -1;
  } work;
  const Lanes lanes = {{{kRun, 0, 1}}, {{kRun, 1, 2}}};
  const auto claimed = std::make_shared<ClaimedLanes>(work, lanes);
  const bool threw = throws<offload::ExecutionError>([&] { claimed->execute(1); });
  if (work.child == 0) _exit(threw || work.n_other != 1 ? 1 : 0);
  CHECK_THAT(!threw);
  CHECK_THAT(status_of(work.child) == 0);
}
#endif

void no_helper_comes_after_the_end() {
  Made made(random_program(60, 3, 3));
  made.execute_right(2);
  offload::Lane::close_all();
  CHECK_THAT(Helpers::instance().n_started() == 0);
  const std::uint64_t n_helped = made.claimed->n_helped();
  made.execute_right(2);
  CHECK_THAT(made.claimed->n_helped() == n_helped);
}

}  // namespace

int main() {
  no_helper_is_needed();
  helpers_take_part();
  a_helper_helps_with_one_execution();
  several_threads_share_the_helpers();
  a_failure_ends_everything_once();
  of_two_failures_the_first_is_told();
  a_helper_that_cannot_take_part_gives_its_lane_back();
  work_may_go_while_helpers_leave();
  lanes_that_are_wrong_are_refused();
  a_woken_thread_may_not_use_the_processor_of_the_other();
  a_helper_that_slept_on_the_callers_processor_is_woken_on_another();
#if !defined(__SANITIZE_THREAD__)
  fork_keeps_helpers_usable();
  a_launch_that_forks_fails_in_the_child();
  a_launch_that_forks_after_the_other_lane_continues_in_the_child();
#endif
  no_helper_comes_after_the_end();  // for the rest of the process
  return offload::test::result();
}
