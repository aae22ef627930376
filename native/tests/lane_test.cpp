#include "offload/lane.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"
#include "offload/lease.hpp"

namespace {

using offload::ExecutionLock;
using offload::Lane;
using offload::Lease;
using offload::Ticket;
using offload::test::status_of;
using offload::test::throws;

void pause_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void tasks_run_in_order() {
  Lane lane;
  std::vector<int> order;
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int task = 0; task < 1000; ++task) {
    tickets.push_back(std::make_shared<Ticket>());
    lane.submit([&order, task] { order.push_back(task); }, tickets.back());
    if (task == 500) pause_for(5);  // long enough for the worker to fall asleep
  }
  for (const auto& ticket : tickets) ticket->wait();
  CHECK_THAT(order.size() == 1000);
  for (int task = 0; task < 1000; ++task) CHECK_THAT(order[static_cast<std::size_t>(task)] == task);
  lane.close();
  CHECK_THAT(lane.idle());
}

void errors_go_to_their_ticket() {
  Lane lane;
  const auto good = std::make_shared<Ticket>();
  const auto bad = std::make_shared<Ticket>();
  lane.submit([] { throw std::runtime_error("broken"); }, bad);
  lane.submit([] {}, good);
  good->wait();
  for (int time = 0; time < 2; ++time) {
    bool threw = false;
    try {
      bad->wait();
    } catch (const std::runtime_error&) {
      threw = true;
    }
    CHECK_THAT(threw);
  }
  CHECK_THAT(bad->done());
}

// Like a Python error, for whose last release the GIL is taken.
struct HeldError {
  HeldError(std::mutex& mutex, std::atomic<bool>& begins) : held(&mutex), is_going(&begins) {}
  HeldError(const HeldError&) = delete;
  HeldError& operator=(const HeldError&) = delete;
  ~HeldError() {
    is_going->store(true);
    bool is_held = held->try_lock();
    for (int turn = 0; turn < 5000 && !is_held; ++turn) {
      pause_for(1);
      is_held = held->try_lock();
    }
    CHECK_THAT(is_held);
    if (is_held) held->unlock();
  }

  std::mutex* held;
  std::atomic<bool>* is_going;
};

void an_error_that_nobody_wants_goes_without_the_lock() {
  Lane lane;
  std::mutex held;
  std::atomic<bool> is_going = false;
  const auto last = std::make_shared<Ticket>();
  {
    const std::lock_guard lock(held);
    lane.submit([&] { throw std::make_shared<HeldError>(held, is_going); },
                std::make_shared<Ticket>());
    while (!is_going) pause_for(1);
    lane.submit([] {}, last);  // with what the worker waits for
  }
  last->wait();
}

void a_ticket_may_be_handed_on() {
  Lane lane;
  Lane finisher;
  const auto good = std::make_shared<Ticket>();
  const auto bad = std::make_shared<Ticket>();
  const auto behind = std::make_shared<Ticket>();
  std::atomic<bool> may_end = false;
  lane.submit(
      [&] {
        finisher.submit(
            [&] {
              while (!may_end) pause_for(1);
            },
            good);
      },
      good, /*hands_on=*/true);
  lane.submit([] { throw std::runtime_error("broken"); }, bad, /*hands_on=*/true);
  lane.submit([] {}, behind);
  behind->wait();  // the lane has continued
  CHECK_THAT(!good->done());
  CHECK_THAT(bad->done());
  may_end = true;
  good->wait();
  CHECK_THAT(throws<std::runtime_error>([&] { bad->wait(); }));
}

void close_finishes_what_is_queued() {
  Lane lane;
  std::atomic<int> n_done = 0;
  for (int task = 0; task < 20; ++task) {
    lane.submit([&n_done] { pause_for(1), ++n_done; }, std::make_shared<Ticket>());
  }
  lane.close();
  lane.close();
  CHECK_THAT(n_done == 20);
  CHECK_THAT(throws<std::logic_error>([&] { lane.submit([] {}, std::make_shared<Ticket>()); }));
}

void many_threads_submit() {
  Lane lane;
  int n_done = 0;  // tasks run one at a time, so it needs no lock
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int task = 0; task < 500; ++task) {
        const auto ticket = std::make_shared<Ticket>();
        lane.submit([&n_done] { ++n_done; }, ticket);
        if (task % 100 == 0) ticket->wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  lane.close();
  CHECK_THAT(n_done == 2000);
}

// A thread that submits during a close gets an error, or a ticket that ends.
void threads_submit_beside_a_close() {
  for (int time = 0; time < 50; ++time) {
    Lane lane;
    std::atomic<int> n_done = 0;
    std::atomic<int> n_ended = 0;
    std::atomic<int> n_taken = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] {
        try {
          while (true) {
            const auto ticket = std::make_shared<Ticket>();
            lane.submit([&n_done] { ++n_done; }, ticket);
            ++n_taken;
            ticket->wait();
            if (ticket->done()) ++n_ended;
          }
        } catch (const std::logic_error&) {
        }
      });
    }
    for (int closer = 0; closer < 2; ++closer) threads.emplace_back([&lane] { lane.close(); });
    for (std::thread& thread : threads) thread.join();
    CHECK_THAT(n_done == n_taken && n_ended == n_taken);
    CHECK_THAT(lane.idle());
  }
}

// As an executable does: on the caller's thread under the execution mutex while the lane is idle,
// otherwise queued; several wait for the same ticket.
void calls_and_submissions_take_turns() {
  Lane lane;
  int n_done = 0;  // needs no lock
  const auto execute = [&] {
    const std::lock_guard lock(lane.execution_mutex());
    ++n_done;
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int time = 0; time < 300; ++time) {
        if (thread % 2 == 0 && lane.idle()) {
          execute();
          continue;
        }
        const auto ticket = std::make_shared<Ticket>();
        lane.submit(execute, ticket);
        std::thread other([&ticket] { ticket->wait(); });
        ticket->wait();
        other.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_THAT(n_done == 4 * 300);
}

void tasks_without_tickets() {
  Lane lane;
  std::vector<int> order;
  const auto last = std::make_shared<Ticket>();
  for (int task = 0; task < 100; ++task) {
    lane.submit([&order, task] { order.push_back(task); }, task == 99 ? last : nullptr);
  }
  last->wait();
  CHECK_THAT(order.size() == 100);
}

void a_lane_knows_its_own_thread() {
  Lane lane;
  CHECK_THAT(!lane.is_current_thread());
  bool inside = false;
  const auto ticket = std::make_shared<Ticket>();
  lane.submit([&] { inside = lane.is_current_thread(); }, ticket);
  ticket->wait();
  CHECK_THAT(inside);
  CHECK_THAT(!lane.is_current_thread());
}

// The worker itself may release the last reference, and cannot wait for itself.
void worker_drops_the_last_reference() {
  struct Owner {
    Lane lane;
  };
  auto owner = std::make_shared<Owner>();
  const auto ticket = std::make_shared<Ticket>();
  owner->lane.submit([owner] { pause_for(2); }, ticket);
  owner.reset();
  ticket->wait();
}

void leases_exclude_overlap_only() {
  int shared = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&shared] {
      for (int time = 0; time < 200; ++time) {
        const Lease lease(100, 200);
        ++shared;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_THAT(shared == 800);
  const Lease first(0, 100);
  const Lease second(100, 200);  // would wait forever if neighbours excluded each other
  const Lease empty(50, 50);
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
// In the child only the forking thread exists; its lanes must be empty and usable.
void fork_keeps_lanes_usable() {
  Lane lane;
  std::atomic<int> n_done = 0;
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int task = 0; task < 50; ++task) {
    tickets.push_back(std::make_shared<Ticket>());
    lane.submit([&n_done] { ++n_done; }, tickets.back());
  }
  const pid_t child = fork();
  if (child == 0) {
    const auto ticket = std::make_shared<Ticket>();
    bool ran = false;
    lane.submit([&ran] { ran = true; }, ticket);
    ticket->wait();
    _exit(ran ? 0 : 1);
  }
  CHECK_THAT(status_of(child) == 0);
  for (const auto& ticket : tickets) ticket->wait();
  CHECK_THAT(n_done == 50);
}

// A launch forks, and the fork waits for another launch, which waits for the former: by a call or
// by a submission.
void a_launch_does_not_wait_for_one_that_forks() {
  for (const bool submits : {false, true}) {
    Lane forking;
    Lane calling;
    std::atomic<bool> is_forking = false;
    std::atomic<bool> is_calling = false;
    bool is_refused = false;
    std::thread other([&] {
      const ExecutionLock execution(calling);
      is_calling = true;
      while (!is_forking) pause_for(1);
      try {
        if (!submits) {
          const ExecutionLock called(forking);
          return;
        }
        const auto ticket = std::make_shared<Ticket>();
        forking.submit([&forking] { const ExecutionLock queued(forking); }, ticket);
        while (!ticket->wait_for(std::chrono::milliseconds(10))) {
          Lane::refuse_wait_beside_fork(*ticket);
        }
      } catch (const offload::ExecutionError&) {
        is_refused = true;
      }
    });
    {
      const ExecutionLock execution(forking);
      while (!is_calling) pause_for(1);
      is_forking = true;
      const pid_t child = fork();
      if (child == 0) _exit(0);
      CHECK_THAT(status_of(child) == 0);
    }
    other.join();
    CHECK_THAT(is_refused);
  }
}

// Nothing waits for a thread that is in no launch: it executes once the launch that forks has
// ended.
void calls_wait_for_a_launch_that_forks() {
  Lane forking;
  Lane busy;
  std::atomic<bool> is_executed = false;
  std::thread other;
  std::thread late([&busy] {
    const ExecutionLock execution(busy);
    pause_for(300);  // a fork waits, and looks more than once
  });
  {
    const ExecutionLock execution(forking);
    other = std::thread([&] {
      const ExecutionLock waits(forking);
      is_executed = true;
    });
    const pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    CHECK_THAT(!is_executed);
  }
  other.join();
  late.join();
  CHECK_THAT(is_executed);
}
#endif

// Python calls other handlers between the wait for launches and the fork. One that waits for a
// thread that executes, or executes itself, ends.
void others_execute_before_a_fork_that_does_not_begin() {
  Lane lane;
  std::atomic<bool> is_held = false;
  std::thread other([&] {
    while (!is_held) pause_for(1);
    const ExecutionLock execution(lane);
  });
  Lane::hold_for_fork();
  is_held = true;
  other.join();
  Lane::release_after_fork();

  std::thread idle([&] {
    while (is_held) pause_for(1);
  });
  Lane::hold_for_fork();
  {
    const ExecutionLock own(lane);
    const Lane made;
  }
  Lane::release_after_fork();
  is_held = false;
  idle.join();
}

// A thread may continue while the interpreter exits, and the worker of a lane that it makes would
// not be joined.
void lanes_made_after_the_end_start_no_thread() {
  Lane before;
  Lane::close_all();
  Lane after;
  for (Lane* lane : {&before, &after}) {
    bool threw = false;
    try {
      lane->submit([] {}, std::make_shared<Ticket>());
    } catch (const std::logic_error&) {
      threw = true;
    }
    CHECK_THAT(threw);
  }
}

}  // namespace

int main() {
  tasks_run_in_order();
  errors_go_to_their_ticket();
  an_error_that_nobody_wants_goes_without_the_lock();
  a_ticket_may_be_handed_on();
  close_finishes_what_is_queued();
  many_threads_submit();
  threads_submit_beside_a_close();
  calls_and_submissions_take_turns();
  tasks_without_tickets();
  a_lane_knows_its_own_thread();
  worker_drops_the_last_reference();
  leases_exclude_overlap_only();
  others_execute_before_a_fork_that_does_not_begin();
#if !defined(__SANITIZE_THREAD__)
  fork_keeps_lanes_usable();
  a_launch_does_not_wait_for_one_that_forks();
  calls_wait_for_a_launch_that_forks();
#endif
  lanes_made_after_the_end_start_no_thread();  // for the rest of the process
  return offload::test::result();
}
