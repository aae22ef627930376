#include "offload/ticket.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"

namespace {

using offload::CancelledError;
using offload::Lane;
using offload::Ticket;
using offload::test::status_of;

bool is_cancelled(const Ticket& ticket) {
  try {
    if (const std::exception_ptr error = ticket.error()) std::rethrow_exception(error);
  } catch (const CancelledError&) {
    return true;
  } catch (...) {
  }
  return false;
}

void a_ticket_goes_through_its_states() {
  Ticket ticket;
  CHECK_THAT(!ticket.done() && !ticket.running());
  CHECK_THAT(ticket.begin());
  CHECK_THAT(ticket.running() && !ticket.cancel());
  ticket.issue();
  CHECK_THAT(ticket.running() && ticket.wait_for_issue(std::chrono::nanoseconds(0)));
  CHECK_THAT(!ticket.wait_for(std::chrono::nanoseconds(0)));
  CHECK_THAT(ticket.begin());  // by the thread that finishes handed-on work
  ticket.finish(nullptr);
  CHECK_THAT(ticket.done() && !ticket.running() && !ticket.cancel() && !ticket.begin());
  ticket.wait();
  ticket.await_end();
  ticket.await_issue();
}

void what_has_not_begun_is_cancelled() {
  Ticket ticket;
  int n_calls = 0;
  ticket.when_done([&n_calls] { ++n_calls; });
  CHECK_THAT(ticket.cancel());
  CHECK_THAT(n_calls == 1);
  CHECK_THAT(ticket.cancel() && ticket.done() && is_cancelled(ticket));
  CHECK_THAT(!ticket.begin());
  CHECK_THAT(n_calls == 1);
}

void callbacks_come_in_order_and_once() {
  Ticket ticket;
  std::vector<int> order;
  for (int index = 0; index < 5; ++index) {
    ticket.when_done([&order, index] { order.push_back(index); });
  }
  ticket.end(nullptr);
  CHECK_THAT(order.empty());  // called without the lock under which the ticket was ended
  ticket.when_done([&order] { order.push_back(9); });
  CHECK_THAT(order == std::vector<int>{9});
  ticket.call_back();
  ticket.call_back();
  CHECK_THAT((order == std::vector<int>{9, 0, 1, 2, 3, 4}));
}

// What a callback captures is released after the call, even if its ticket lives on.
void callbacks_keep_nothing() {
  Ticket ticket;
  const auto kept = std::make_shared<int>(1);
  ticket.when_done([kept] {});
  CHECK_THAT(kept.use_count() == 2);
  ticket.finish(nullptr);
  CHECK_THAT(kept.use_count() == 1);
}

// Tickets of which each is ended by a callback of the one before, as dependents are: any number.
void a_chain_of_any_length_ends() {
  constexpr std::size_t kLength = 200'000;
  std::vector<std::unique_ptr<Ticket>> chain;
  std::vector<std::size_t> ended;
  ended.reserve(kLength);
  for (std::size_t index = 0; index < kLength; ++index) {
    chain.push_back(std::make_unique<Ticket>());
    if (index == 0) continue;
    chain[index - 1]->when_done([&chain, &ended, index] {
      ended.push_back(index);
      chain[index]->finish(nullptr);
    });
  }
  chain[0]->finish(nullptr);
  CHECK_THAT(ended.size() == kLength - 1 && ended.back() == kLength - 1);
  CHECK_THAT(chain.back()->done());
}

// Callbacks inside callbacks are called before the call that ended their ticket returns.
void a_callback_sees_the_callbacks_of_what_it_ends() {
  Ticket first, second;
  bool is_called = false, was_called = false;
  second.when_done([&is_called] { is_called = true; });
  first.when_done([&] {
    second.finish(nullptr);
    was_called = is_called;
  });
  first.finish(nullptr);
  CHECK_THAT(was_called);
}

void a_lane_drops_what_was_cancelled() {
  Lane lane;
  std::atomic<bool> may_end = false;
  std::atomic<int> n_ran = 0;
  lane.submit(
      [&] {
        while (!may_end) std::this_thread::yield();
      },
      std::make_shared<Ticket>());
  std::vector<std::shared_ptr<Ticket>> tickets;
  const auto kept = std::make_shared<int>(1);
  for (int task = 0; task < 10; ++task) {
    tickets.push_back(std::make_shared<Ticket>());
    lane.submit([&n_ran, kept] { ++n_ran; }, tickets.back());
  }
  for (int task = 0; task < 10; task += 2) {
    CHECK_THAT(tickets[static_cast<std::size_t>(task)]->cancel());
  }
  may_end = true;
  lane.close();
  CHECK_THAT(n_ran == 5);
  CHECK_THAT(kept.use_count() == 1);
  for (std::size_t task = 0; task < 10; ++task) {
    CHECK_THAT(tickets[task]->done() && is_cancelled(*tickets[task]) == (task % 2 == 0));
  }
}

void a_callback_may_submit_to_its_lane() {
  Lane lane;
  const auto first = std::make_shared<Ticket>();
  const auto second = std::make_shared<Ticket>();
  std::atomic<bool> called_back = false;
  std::atomic<bool> own = false;
  first->when_done([&] {
    called_back = Lane::calls_back() && lane.is_current_thread() && lane.idle();
    lane.submit([] {}, second);
    own = Lane::is_own_work(*second);
  });
  lane.submit([] {}, first);
  first->wait();
  while (second->worker() == nullptr) std::this_thread::yield();
  second->wait();
  CHECK_THAT(called_back && own);
  CHECK_THAT(!Lane::calls_back() && !Lane::is_own_work(*second));
}

// Two lanes wait for each other's tickets, which were submitted before: no deadlock.
void lanes_wait_for_each_other() {
  Lane lanes[2];
  std::atomic<int> sum = 0;
  std::shared_ptr<Ticket> last;
  for (int step = 0; step < 500; ++step) {
    const auto ticket = std::make_shared<Ticket>();
    lanes[step % 2].submit(
        [&sum, last, step] {
          if (last) last->await_end();
          if (sum == step) ++sum;
        },
        ticket);
    last = ticket;
  }
  last->wait();
  CHECK_THAT(sum == 500);
}

// Either `begin` or `cancel` succeeds, and a callback registered meanwhile is called once.
void threads_cancel_begin_and_wait() {
  for (int time = 0; time < 300; ++time) {
    const auto ticket = std::make_shared<Ticket>();
    std::atomic<int> n_cancelled = 0;
    std::atomic<int> n_ran = 0;
    std::atomic<int> n_called = 0;
    std::vector<std::thread> threads;
    threads.emplace_back([&] { n_cancelled += ticket->cancel(); });
    threads.emplace_back([&] {
      if (!ticket->begin()) return;
      ++n_ran;
      ticket->finish(nullptr);
    });
    threads.emplace_back([&] { ticket->when_done([&n_called] { ++n_called; }); });
    threads.emplace_back([&] { ticket->await_end(); });
    for (std::thread& thread : threads) thread.join();
    CHECK_THAT(n_cancelled + n_ran == 1);
    CHECK_THAT(n_called == 1);
    CHECK_THAT(is_cancelled(*ticket) == (n_cancelled == 1));
  }
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
// In the child the parent's work is not done, and waiting threads get an error; also for a ticket
// that threads of the parent wait for, whose condition would never be destroyed.
void tickets_of_the_parent_have_failed_in_the_child() {
  auto waited_for = std::make_shared<Ticket>();
  const auto ended = std::make_shared<Ticket>();
  ended->finish(nullptr);
  std::thread waiter([waited_for] { waited_for->await_end(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const pid_t child = fork();
  if (child == 0) {
    bool threw = false;
    try {
      waited_for->wait();
    } catch (const offload::ExecutionError&) {
      threw = true;
    }
    const bool is_right = threw && waited_for->done() && ended->done() && !ended->error();
    waited_for.reset();
    Ticket fresh;
    _exit(is_right && !fresh.done() && fresh.cancel() ? 0 : 1);
  }
  CHECK_THAT(status_of(child) == 0);
  CHECK_THAT(!waited_for->done());
  waited_for->finish(nullptr);
  waiter.join();
}
#endif

}  // namespace

int main() {
  a_ticket_goes_through_its_states();
  what_has_not_begun_is_cancelled();
  callbacks_come_in_order_and_once();
  callbacks_keep_nothing();
  a_chain_of_any_length_ends();
  a_callback_sees_the_callbacks_of_what_it_ends();
  a_lane_drops_what_was_cancelled();
  a_callback_may_submit_to_its_lane();
  lanes_wait_for_each_other();
  threads_cancel_begin_and_wait();
#if !defined(__SANITIZE_THREAD__)
  {
    const Lane lane;
  }  // which watches forks
  tickets_of_the_parent_have_failed_in_the_child();
#endif
  return offload::test::result();
}
