#include "offload/host_stages.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"

namespace {

using offload::HostStage;
using offload::HostStages;
using offload::StagedLaunches;
using offload::StageWatcher;
using offload::test::status_of;
using offload::test::throws;

constexpr std::array kStages = {HostStage::kTile, HostStage::kMemory, HostStage::kLaunch};

std::size_t number(HostStage stage) { return static_cast<std::size_t>(stage); }

void pause_for(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// Launches that carry a number from stage to stage, without a lock: what orders it is the pipeline.
class Numbers final : public StagedLaunches {
 public:
  explicit Numbers(std::size_t n_launches)
      : tiled(n_launches), addressed(n_launches), launched(n_launches), threads(3 * n_launches) {}

  std::size_t n_launches() const override { return launched.size(); }

  void carry_out(HostStage stage, std::size_t launch) override {
    threads[3 * launch + number(stage)] = std::this_thread::get_id();
    if (before) before(stage, launch);
    if (stage == HostStage::kTile) tiled[launch] = launch + 1;
    if (stage == HostStage::kMemory) addressed[launch] = 2 * tiled[launch];
    if (stage == HostStage::kLaunch) {
      launched[launch] = addressed[launch] + 1;
      order.push_back(launch);  // one thread launches
    }
  }

  bool is_whole() const {
    for (std::size_t launch = 0; launch < launched.size(); ++launch) {
      if (launched[launch] != 2 * (launch + 1) + 1) return false;
    }
    return order.size() == launched.size() && std::is_sorted(order.begin(), order.end());
  }

  std::set<std::thread::id> threads_of(HostStage stage) const {
    std::set<std::thread::id> found;
    for (std::size_t launch = 0; launch < launched.size(); ++launch) {
      found.insert(threads[3 * launch + number(stage)]);
    }
    return found;
  }

  std::function<void(HostStage, std::size_t)> before;
  std::vector<std::size_t> tiled;
  std::vector<std::size_t> addressed;
  std::vector<std::size_t> launched;
  std::vector<std::size_t> order;
  std::vector<std::thread::id> threads;
};

void every_number_of_cores_carries_out_every_stage_in_order() {
  for (int n_cores = 1; n_cores <= 6; ++n_cores) {
    HostStages stages(n_cores);
    for (const std::size_t n_launches : {0, 1, 2, 7, 500}) {
      for (int time = 0; time < 3; ++time) {
        Numbers numbers(n_launches);
        stages.run(numbers, nullptr);
        CHECK_THAT(numbers.is_whole());
      }
    }
  }
}

void stages_have_the_threads_of_their_cores() {
  const auto here = std::this_thread::get_id();
  for (int n_cores = 1; n_cores <= 5; ++n_cores) {
    HostStages stages(n_cores);
    Numbers numbers(40);
    stages.run(numbers, nullptr);
    const auto tilers = numbers.threads_of(HostStage::kTile);
    const auto writers = numbers.threads_of(HostStage::kMemory);
    CHECK_THAT(numbers.threads_of(HostStage::kLaunch) == std::set{here});
    CHECK_THAT(writers.size() == 1);
    CHECK_THAT((writers.count(here) == 1) == (n_cores < 3));
    CHECK_THAT(tilers.size() == static_cast<std::size_t>(n_cores < 4 ? 1 : n_cores - 2));
    CHECK_THAT((tilers.count(here) == 1) == (n_cores == 1));
  }
}

// The first launch waits until a later one was tiled: on one core that would never end.
void tiling_goes_on_while_launches_wait() {
  for (const int n_cores : {2, 3, 4}) {
    HostStages stages(n_cores);
    Numbers numbers(20);
    std::atomic<bool> is_tiled = false;
    numbers.before = [&](HostStage stage, std::size_t launch) {
      if (stage == HostStage::kTile && launch == 13) is_tiled = true;
      while (stage == HostStage::kLaunch && launch == 0 && !is_tiled) pause_for(100);
    };
    stages.run(numbers, nullptr);
    CHECK_THAT(numbers.is_whole());
  }
}

void the_first_failing_launch_is_told_once_and_the_next_run_is_whole() {
  for (int n_cores = 1; n_cores <= 4; ++n_cores) {
    HostStages stages(n_cores);
    for (const HostStage failing : kStages) {
      for (const std::size_t at : {0, 5, 29}) {
        Numbers numbers(30);
        numbers.before = [&](HostStage stage, std::size_t launch) {
          if (stage == failing && launch == at) throw std::runtime_error("broken");
        };
        std::string told;
        try {
          stages.run(numbers, nullptr);
        } catch (const std::runtime_error& error) {
          told = error.what();
        }
        CHECK_THAT(told == "broken");
        CHECK_THAT(numbers.order.size() == at);  // what came before was launched, or not yet
        Numbers next(30);
        stages.run(next, nullptr);
        CHECK_THAT(next.is_whole());
      }
    }
  }
}

// Of two errors at once that of the earlier launch is told.
void the_earlier_of_two_errors_is_told() {
  HostStages stages(4);
  for (int time = 0; time < 200; ++time) {
    Numbers numbers(2);
    std::atomic<int> n_there = 0;
    numbers.before = [&](HostStage stage, std::size_t launch) {
      if (stage != HostStage::kTile) return;
      ++n_there;
      while (n_there < 2) std::this_thread::yield();
      throw std::runtime_error(std::to_string(launch));
    };
    std::string told;
    try {
      stages.run(numbers, nullptr);
    } catch (const std::runtime_error& error) {
      told = error.what();
    }
    CHECK_THAT(told == "0");
  }
}

class Counter final : public StageWatcher {
 public:
  void begins(HostStage stage, std::size_t) noexcept override { ++n_begun[number(stage)]; }
  void ends(HostStage stage, std::size_t) noexcept override { ++n_ended[number(stage)]; }
  std::array<std::atomic<int>, 3> n_begun{};
  std::array<std::atomic<int>, 3> n_ended{};
};

void a_watcher_sees_each_stage_of_each_launch() {
  for (int n_cores = 1; n_cores <= 4; ++n_cores) {
    HostStages stages(n_cores);
    Counter counter;
    Numbers numbers(25);
    stages.run(numbers, &counter);
    for (const HostStage stage : kStages) {
      CHECK_THAT(counter.n_begun[number(stage)] == 25);
      CHECK_THAT(counter.n_ended[number(stage)] == 25);
    }
  }
}

void runs_of_several_threads_take_turns() {
  HostStages stages(3);
  std::vector<std::thread> callers;
  std::atomic<int> n_whole = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int time = 0; time < 50; ++time) {
        Numbers numbers(20);
        stages.run(numbers, nullptr);
        n_whole += numbers.is_whole();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_THAT(n_whole == 200);
}

void closing_waits_for_a_run_and_later_runs_are_refused() {
  HostStages stages(3);
  std::atomic<bool> has_begun = false;
  Numbers numbers(20);
  numbers.before = [&](HostStage, std::size_t) {
    has_begun = true;
    pause_for(200);
  };
  std::thread caller([&] { stages.run(numbers, nullptr); });
  while (!has_begun) pause_for(100);
  stages.close();
  caller.join();
  CHECK_THAT(numbers.is_whole());
  CHECK_THAT(throws<offload::ExecutionError>([&] {
    Numbers more(2);
    stages.run(more, nullptr);
  }));
}

void threads_know_whose_they_are() {
  const int one = 0;
  const int other = 0;
  HostStages stages(3, &one);
  Numbers numbers(5);
  numbers.before = [&](HostStage stage, std::size_t) {
    CHECK_THAT(HostStages::is_helping_with(&one) == (stage != HostStage::kLaunch));
    CHECK_THAT(!HostStages::is_helping_with(&other));
    CHECK_THAT(!HostStages::is_helping_with(nullptr));
  };
  stages.run(numbers, nullptr);
  CHECK_THAT(!HostStages::is_helping_with(&one));
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
// A fork of another thread waits for the run; in the child there are threads again.
void a_child_of_a_fork_runs_by_threads_of_its_own() {
  HostStages stages(3);
  std::atomic<bool> has_begun = false;
  Numbers numbers(20);
  numbers.before = [&](HostStage, std::size_t) {
    has_begun = true;
    pause_for(200);
  };
  std::thread caller([&] { stages.run(numbers, nullptr); });
  while (!has_begun) pause_for(100);
  const pid_t child = fork();
  if (child == 0) {
    Numbers here(30);
    stages.run(here, nullptr);
    _exit(here.is_whole() ? 0 : 1);
  }
  caller.join();
  CHECK_THAT(status_of(child) == 0);
  Numbers after(30);
  stages.run(after, nullptr);
  CHECK_THAT(after.is_whole());
}
#endif

void fewer_cores_than_one_are_refused() {
  CHECK_THAT(throws<std::invalid_argument>([&] { HostStages stages(0); }));
}

}  // namespace

int main() {
  every_number_of_cores_carries_out_every_stage_in_order();
  stages_have_the_threads_of_their_cores();
  tiling_goes_on_while_launches_wait();
  the_first_failing_launch_is_told_once_and_the_next_run_is_whole();
  the_earlier_of_two_errors_is_told();
  a_watcher_sees_each_stage_of_each_launch();
  runs_of_several_threads_take_turns();
  closing_waits_for_a_run_and_later_runs_are_refused();
  threads_know_whose_they_are();
#if !defined(__SANITIZE_THREAD__)
  a_child_of_a_fork_runs_by_threads_of_its_own();
#endif
  fewer_cores_than_one_are_refused();
  return offload::test::result();
}
