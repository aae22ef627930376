#include "offload/lane.hpp"

#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/look_for.hpp"
#include "core/rest_keeper.hpp"
#include "core/start_thread.hpp"
#include "offload/calling_back.hpp"
#include "offload/errors.hpp"
#include "offload/thread_owner.hpp"

namespace offload {

struct LaneState {
  struct Task {
    std::function<void()> work;
    std::shared_ptr<Ticket> ticket;
    bool hands_on;
  };

  std::recursive_mutex execution;
  std::atomic<std::thread::id> executing;  // the thread that holds it, by an ExecutionLock
  std::atomic<bool> forks = false;         // that thread forks
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> queue;
  std::atomic<std::size_t> n_queued = 0;
  bool running = false;
  bool closed = false;
  bool has_worker = false;
  std::thread worker;
};

namespace {

// The lane whose worker this thread is.
thread_local const LaneState* own_lane = nullptr;

// Whether this thread is running a ticket's callbacks.
thread_local bool is_calling_back = false;

// The executions whose launches this thread carries out, one within the other.
thread_local int n_executing = 0;

// The interval at which a launch that waits looks whether a fork waits for it.
constexpr auto kForkLookedAt = std::chrono::milliseconds(50);

// All live lanes and thread owners, so that fork and interpreter exit find them at rest.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<LaneState>> states;
  std::vector<ThreadOwner*> owners;
  std::deque<LaneState::Task> abandoned;  // in the child of a fork, until drop_abandoned
  std::atomic<bool> ended = false;        // the interpreter is exiting: no thread may start
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: lanes may outlive statics
  return *instance;
}

void* (*release_before_wait)() = nullptr;
void (*acquire_after_wait)(void*) = nullptr;

void* release() { return release_before_wait != nullptr ? release_before_wait() : nullptr; }

void acquire(void* released) {
  if (acquire_after_wait != nullptr) acquire_after_wait(released);
}

// While it lives, this thread does not hold the GIL: a thread that forks holds the registry, and
// waits for the GIL.
class WithoutGil {
 public:
  WithoutGil() : released_(release()) {}
  ~WithoutGil() { acquire(released_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* const released_;
};

// Waits in the system, unlike a loop of attempts, which a lane that executes again and again
// starves.
bool lock_until(std::recursive_mutex& mutex, const timespec& until) {
  return pthread_mutex_timedlock(mutex.native_handle(), &until) == 0;
}

timespec in(std::chrono::milliseconds time) {
  timespec found{};
  clock_gettime(CLOCK_REALTIME, &found);  // the clock of pthread_mutex_timedlock
  const auto ns = found.tv_nsec + std::chrono::nanoseconds(time).count();
  found.tv_sec += ns / 1'000'000'000;
  found.tv_nsec = ns % 1'000'000'000;
  return found;
}

[[noreturn]] void refuse_beside_fork() {
  throw ExecutionError(
      "a launch waits for an executable of which a launch forks this process, and the fork waits "
      "for the launch that waits: start processes outside of launches");
}

// Holds the registry and waits until no lane executes but those of the thread that `forks`. A
// launch may execute another executable, make one or drop one, and so wait for what is held here:
// after a while all is given back, and the lane that did not end is waited for alone. The while
// doubles, so that it becomes longer than any execution.
void hold_executions(std::thread::id forks) {
  auto patience = std::chrono::milliseconds(200);
  std::shared_ptr<LaneState> first;  // held already
  while (true) {
    registry().mutex.lock();
    const timespec until = in(patience);
    auto& states = registry().states;
    for (const auto& state : states) {
      if (state->executing == forks) state->forks = true;
    }
    auto late = states.begin();
    while (late != states.end() &&
           ((*late)->executing == forks || lock_until((*late)->execution, until))) {
      ++late;
    }
    std::shared_ptr<LaneState> next = late == states.end() ? nullptr : *late;
    if (first) first->execution.unlock();  // its lane may have gone; else it is held twice
    if (!next) return;
    while (late != states.begin()) {
      if ((*--late)->executing != forks) (*late)->execution.unlock();
    }
    registry().mutex.unlock();
    next->execution.lock();
    first = std::move(next);
    patience *= 2;
  }
}

void hold_at_rest(std::thread::id forks) {
  hold_executions(forks);
  for (ThreadOwner* owner : registry().owners) owner->hold();
}

void release_at_rest(std::thread::id forks) {
  for (ThreadOwner* owner : registry().owners) owner->release();
  for (const auto& state : registry().states) {
    if (state->executing == forks) {
      state->forks = false;
    } else {
      state->execution.unlock();
    }
  }
  registry().mutex.unlock();
}

// Of this thread, while it is about to fork. The child of a fork leaves it, as it has no thread.
thread_local RestKeeper* keeper = nullptr;

void end_keeper() { delete std::exchange(keeper, nullptr); }

// A thread that is about to fork may yet drop a lane: then the fork waits again.
std::unique_lock<std::mutex> locked_registry() {
  end_keeper();
  return std::unique_lock(registry().mutex);
}

// Whether the process has no other thread: then nothing can begin before a fork, and Python would
// warn of the keeper's.
bool is_only_thread() {
  struct stat tasks{};
  constexpr nlink_t kOwnLinks = 2;  // the folder's own; each thread has one
  return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == kOwnLinks + 1;
}

// fork copies only the calling thread: every lane is held across it, and the child's lanes start
// their own workers. Queues are held last, with the GIL: a thread that submits holds the GIL while
// it waits for a queue, and who holds a queue waits for nothing.
void hold_all() {
  if (keeper != nullptr && !keeper->keep()) end_keeper();
  if (keeper == nullptr) {
    void* const released = release();
    hold_at_rest(std::this_thread::get_id());
    acquire(released);
  }
  for (const auto& state : registry().states) state->mutex.lock();
}

void release_all() {
  for (const auto& state : registry().states) state->mutex.unlock();
  if (keeper != nullptr) return end_keeper();
  release_at_rest(std::this_thread::get_id());
}

void restart_all() {
  keeper = nullptr;
  Ticket::note_fork();
  // The parent's threads do not exist here and may be neither joined nor notified. A mutex
  // identifies its owner by thread number, which differs in the child. All are therefore
  // constructed anew.
  // Dropping work takes the GIL, for which threads of the parent may have waited.
  for (const auto& state : registry().states) {
    std::move(state->queue.begin(), state->queue.end(), std::back_inserter(registry().abandoned));
    state->queue.clear();
    state->n_queued = 0;
    state->running = false;
    state->has_worker = false;
    state->forks = false;
    new (&state->worker) std::thread();
    new (&state->changed) std::condition_variable();
    new (&state->mutex) std::mutex();
    new (&state->execution) std::recursive_mutex();
  }
  own_lane = nullptr;  // a worker that forked is no worker in the child
  for (ThreadOwner* owner : registry().owners) owner->restart();
  new (&registry().mutex) std::mutex();
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(hold_all, release_all, restart_all); });
}

void run(const std::shared_ptr<LaneState>& state) {
  own_lane = state.get();
  while (true) {
    std::unique_lock lock(state->mutex);
    if (state->queue.empty() && !state->closed) {
      lock.unlock();
      look_for([&] { return state->n_queued != 0; });
      lock.lock();
    }
    state->changed.wait(lock, [&] { return !state->queue.empty() || state->closed; });
    if (state->queue.empty()) return;
    LaneState::Task task = std::move(state->queue.front());
    state->queue.pop_front();
    --state->n_queued;
    state->running = true;
    lock.unlock();
    std::exception_ptr error;
    const bool is_wanted = !task.ticket || task.ticket->begin();
    try {
      if (is_wanted) task.work();
    } catch (...) {
      error = std::current_exception();
    }
    task.work = nullptr;  // releases what the task kept alive before its end is reported
    const bool ends = is_wanted && task.ticket && (error || !task.hands_on);
    lock.lock();
    state->running = false;
    if (ends) task.ticket->end(std::move(error));  // locked, so that a fork sees it complete
    lock.unlock();
    if (ends) {
      const CallingBack calling_back;
      task.ticket->call_back();
    }
    // The ticket and the error are released here, without the lock: releasing Python objects takes
    // the GIL, and a thread that holds the GIL may wait for the lock.
  }
}

}  // namespace

Executing::Executing() noexcept { ++n_executing; }

Executing::~Executing() { --n_executing; }

// A thread that is in no launch holds nothing that a fork waits for.
ExecutionLock::ExecutionLock(const Lane& lane) : state_(*lane.state_) {
  if (!state_.execution.try_lock()) {
    waited_ = true;
    end_keeper();
    if (n_executing == 1) {  // by this lock itself
      state_.execution.lock();
    } else {
      while (!lock_until(state_.execution, in(kForkLookedAt))) {
        if (state_.forks) refuse_beside_fork();
      }
    }
  }
  // Only this thread has to see it.
  before_ = state_.executing.load(std::memory_order_relaxed);
  state_.executing.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

ExecutionLock::~ExecutionLock() {
  state_.executing.store(before_, std::memory_order_relaxed);
  state_.execution.unlock();
}

CallingBack::CallingBack() noexcept : before_(is_calling_back) { is_calling_back = true; }

CallingBack::~CallingBack() { is_calling_back = before_; }

Lane::Lane() : state_(std::make_shared<LaneState>()) {
  watch_forks();
  const WithoutGil without_gil;
  const auto lock = locked_registry();
  state_->closed = registry().ended;
  registry().states.push_back(state_);
}

Lane::~Lane() {
  close();
  const WithoutGil without_gil;
  const auto lock = locked_registry();
  auto& states = registry().states;
  states.erase(std::remove(states.begin(), states.end(), state_), states.end());
}

void Lane::submit(std::function<void()>&& task, std::shared_ptr<Ticket> ticket, bool hands_on) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) throw std::logic_error("the executable is closed");
    if (!state_->has_worker) {  // first, since it may fail
      state_->worker = start_thread("execute what is submitted", [state = state_] { run(state); });
      state_->has_worker = true;
    }
    if (ticket) ticket->set_worker(state_.get());
    state_->queue.push_back({std::move(task), std::move(ticket), hands_on});
    ++state_->n_queued;
  }
  state_->changed.notify_one();  // without the mutex, which the worker takes at once
}

std::recursive_mutex& Lane::execution_mutex() noexcept { return state_->execution; }

bool Lane::is_current_thread() const { return own_lane == state_.get(); }

bool Lane::calls_back() noexcept { return is_calling_back; }

bool Lane::is_own_work(const Ticket& ticket) noexcept {
  return own_lane != nullptr && ticket.worker() == own_lane;
}

void Lane::refuse_wait_beside_fork(const Ticket& ticket) {
  if (n_executing == 0) return;
  const std::unique_lock lock(registry().mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;  // the next time
  for (const auto& state : registry().states) {
    if (state.get() == ticket.worker() && state->forks) refuse_beside_fork();
  }
}

bool Lane::idle() const {
  const std::lock_guard lock(state_->mutex);
  return state_->queue.empty() && !state_->running;
}

void Lane::close() noexcept {
  std::thread worker;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
    worker = std::move(state_->worker);
  }
  if (!worker.joinable()) return;
  if (worker.get_id() == std::this_thread::get_id()) {
    worker.detach();
  } else {
    worker.join();
  }
}

void Lane::set_fork_hooks(void* (*release)(), void (*acquire)(void*)) noexcept {
  release_before_wait = release;
  acquire_after_wait = acquire;
}

void Lane::close_all() noexcept {
  std::vector<std::thread> workers;
  {
    const auto lock = locked_registry();
    registry().ended = true;
    for (const auto& state : registry().states) {
      const std::lock_guard state_lock(state->mutex);
      state->closed = true;
      state->changed.notify_all();
      if (state->worker.joinable()) workers.push_back(std::move(state->worker));
    }
  }
  for (std::thread& worker : workers) worker.join();
  const auto lock = locked_registry();
  for (ThreadOwner* owner : registry().owners) owner->end();
}

void Lane::hold_for_fork() {
  if (keeper != nullptr || is_only_thread()) return;
  watch_forks();
  void* const released = release();
  try {
    const auto forks = std::this_thread::get_id();
    keeper = new RestKeeper([forks] { hold_at_rest(forks); }, [forks] { release_at_rest(forks); });
  } catch (const ExecutionError&) {  // the fork waits itself
  }
  acquire(released);
  if (keeper != nullptr) keeper->limit();
}

void Lane::release_after_fork() noexcept { end_keeper(); }

void Lane::drop_abandoned() noexcept {
  std::deque<LaneState::Task> abandoned;  // destroyed without the lock
  const WithoutGil without_gil;
  const auto lock = locked_registry();
  abandoned.swap(registry().abandoned);
}

bool Lane::all_closed() noexcept { return registry().ended; }

void register_thread_owner(ThreadOwner& owner) {
  watch_forks();
  const auto lock = locked_registry();
  registry().owners.push_back(&owner);
  if (registry().ended) owner.end();
}

void unregister_thread_owner(ThreadOwner& owner) noexcept {
  const auto lock = locked_registry();
  auto& owners = registry().owners;
  owners.erase(std::remove(owners.begin(), owners.end(), &owner), owners.end());
}

}  // namespace offload
