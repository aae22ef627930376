#include "offload/ticket.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include "core/look_for.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

// Forks of this process and its ancestors. Changed only while the process has one thread.
std::atomic<std::uint64_t> n_forks_so_far = 0;

// Held while a ticket is made usable in the child of a fork. Never destroyed.
std::mutex& fork_mutex() {
  static auto* const instance = new std::mutex;
  return *instance;
}

using Callbacks = std::vector<std::function<void()>>;

// How many callbacks of a thread may be inside one another, each in the end of a ticket by the one
// before. Those that are deeper follow one after the other, so that a chain of any length ends
// without exhausting the stack.
constexpr int kMostNested = 16;

thread_local int n_nested = 0;
thread_local Callbacks* following = nullptr;  // of the deepest call, on its stack

void call_all(Callbacks callbacks) noexcept {
  if (following != nullptr) {
    std::move(callbacks.begin(), callbacks.end(), std::back_inserter(*following));
    return;
  }
  ++n_nested;
  const bool is_deepest = n_nested == kMostNested;
  if (is_deepest) following = &callbacks;
  for (std::size_t next = 0; next < callbacks.size();) {
    const std::function<void()> one = std::move(callbacks[next++]);
    if (next == callbacks.size()) {  // what has been called does not pile up in a long chain
      callbacks.clear();
      next = 0;
    }
    one();
  }
  if (is_deepest) following = nullptr;
  --n_nested;
}

}  // namespace

Ticket::Ticket() : n_forks_(n_forks_so_far.load()) {}

void Ticket::note_fork() noexcept {
  new (&fork_mutex()) std::mutex();
  ++n_forks_so_far;
}

// Constructs the mutex and the condition anew, which threads of the parent may have held. A change
// of state that those threads were making is either complete or absent: the state is one word,
// written after the error.
void Ticket::notice_fork() const noexcept {
  const std::uint64_t now = n_forks_so_far.load();
  if (n_forks_.load(std::memory_order_acquire) == now) return;
  const std::lock_guard lock(fork_mutex());
  if (n_forks_.load() == now) return;
  new (&mutex_) std::mutex();
  new (&changed_) std::condition_variable();
  if (state_ != State::kDone) {
    error_ = std::make_exception_ptr(ExecutionError(
        "the process was forked while this execution was under way: execute it again here"));
    state_ = State::kDone;
  }
  n_forks_.store(now, std::memory_order_release);
}

Ticket::State Ticket::state() const noexcept {
  notice_fork();
  return state_.load(std::memory_order_acquire);
}

bool Ticket::done() const noexcept { return state() == State::kDone; }

bool Ticket::running() const noexcept {
  const State now = state();
  return now == State::kRunning || now == State::kIssued;
}

std::exception_ptr Ticket::error() const { return done() ? error_ : nullptr; }

void Ticket::wait() {
  if (!done()) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ == State::kDone; });
  }
  if (error_) std::rethrow_exception(error_);
}

bool Ticket::wait_for(State least, std::chrono::nanoseconds time) {
  if (state() >= least) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return state_ >= least; });
}

bool Ticket::wait_for(std::chrono::nanoseconds time) { return wait_for(State::kDone, time); }

bool Ticket::wait_for_issue(std::chrono::nanoseconds time) {
  return wait_for(State::kIssued, time);
}

void Ticket::await(State least) noexcept {
  if (look_for([&] { return state() >= least; })) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_ >= least; });
}

void Ticket::await_end() noexcept { await(State::kDone); }

void Ticket::await_issue() noexcept { await(State::kIssued); }

bool Ticket::begin() noexcept {
  if (done()) return false;
  const std::lock_guard lock(mutex_);
  if (state_ == State::kDone) return false;
  if (state_ == State::kWaiting) state_ = State::kRunning;
  return true;
}

void Ticket::issue() noexcept {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kDone) state_ = State::kIssued;
  changed_.notify_all();
}

bool Ticket::cancel() noexcept {
  notice_fork();
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kDone) {
      try {
        if (error_) std::rethrow_exception(error_);
      } catch (const CancelledError&) {
        return true;
      } catch (...) {
      }
      return false;
    }
    if (state_ != State::kWaiting) return false;
    error_ = std::make_exception_ptr(CancelledError("it was cancelled before it began"));
    state_ = State::kDone;
    changed_.notify_all();
  }
  call_back();
  return true;
}

void Ticket::finish(std::exception_ptr error) noexcept {
  end(std::move(error));
  call_back();
}

void Ticket::end(std::exception_ptr error) noexcept {
  notice_fork();
  const std::lock_guard lock(mutex_);
  if (state_ == State::kDone) return;  // already ended, in the child of a fork
  error_ = std::move(error);
  state_.store(State::kDone, std::memory_order_release);
}

// Wakes those that wait only here, where no lock is held: a thread that wakes up takes the ticket's
// mutex at once, and often the processor of the thread that woke it.
void Ticket::call_back() noexcept {
  changed_.notify_all();
  Callbacks callbacks;
  {
    const std::lock_guard lock(mutex_);
    callbacks.swap(callbacks_);
  }
  if (!callbacks.empty()) call_all(std::move(callbacks));
}

void Ticket::when_done(std::function<void()> function) {
  if (!done()) {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kDone) return callbacks_.push_back(std::move(function));
  }
  function();
}

}  // namespace offload
