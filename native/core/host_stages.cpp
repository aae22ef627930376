#include "offload/host_stages.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/look_for.hpp"
#include "core/start_thread.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

// What this thread runs stages of.
thread_local const void* helped = nullptr;

void carry_out(StagedLaunches& launches, StageWatcher* watcher, HostStage stage,
               std::size_t launch) {
  if (watcher != nullptr) watcher->begins(stage, launch);
  launches.carry_out(stage, launch);
  if (watcher != nullptr) watcher->ends(stage, launch);
}

void carry_out_inline(StagedLaunches& launches, StageWatcher* watcher) {
  const std::size_t n_launches = launches.n_launches();
  for (std::size_t launch = 0; launch < n_launches; ++launch) {
    for (const HostStage stage : {HostStage::kTile, HostStage::kMemory, HostStage::kLaunch}) {
      carry_out(launches, watcher, stage, launch);
    }
  }
}

}  // namespace

// One run: how far each thread is, and the first error. A thread hands a launch on by counting it,
// and wakes the others only where one sleeps; both sides are sequentially consistent, so that a
// thread that falls asleep sees the count, or the counting thread sees it asleep.
struct HostStages::Pass {
  Pass(StagedLaunches& of, StageWatcher* told, std::size_t n_tilers)
      : launches(of),
        watcher(told),
        n_launches(of.n_launches()),
        n_tiled(n_tilers),
        first_failed(n_launches) {}

  // Carries out a stage of every `step`th launch, each once the stage before has counted it.
  template <typename IsReady>
  void carry_out_all(HostStage stage, std::size_t first, std::size_t step, IsReady is_ready,
                     std::atomic<std::size_t>* counter) noexcept {
    for (std::size_t launch = first; launch < n_launches; launch += step) {
      if (!wait(launch, [&] { return is_ready(launch); })) return;
      try {
        carry_out(launches, watcher, stage, launch);
      } catch (...) {
        return fail(launch, std::current_exception());
      }
      if (counter == nullptr) continue;
      ++*counter;
      wake();
    }
  }

  void tile(std::size_t tiler) noexcept {
    carry_out_all(
        HostStage::kTile, tiler, n_tiled.size(), [](std::size_t) { return true; }, &n_tiled[tiler]);
  }

  bool is_tiled(std::size_t launch) const {
    return n_tiled[launch % n_tiled.size()] > launch / n_tiled.size();
  }

  void write_addresses() noexcept {
    carry_out_all(
        HostStage::kMemory, 0, 1, [this](std::size_t launch) { return is_tiled(launch); },
        &n_addressed);
  }

  void launch() noexcept {
    carry_out_all(
        HostStage::kLaunch, 0, 1, [this](std::size_t launch) { return n_addressed > launch; },
        nullptr);
  }

  void write_addresses_and_launch() noexcept {
    for (std::size_t at = 0; at < n_launches; ++at) {
      if (!wait(at, [&] { return is_tiled(at); })) return;
      try {
        carry_out(launches, watcher, HostStage::kMemory, at);
        carry_out(launches, watcher, HostStage::kLaunch, at);
      } catch (...) {
        return fail(at, std::current_exception());
      }
    }
  }

  // False: this launch or one before it has failed, and nothing more is to be done.
  template <typename IsSo>
  bool wait(std::size_t launch, IsSo is_so) {
    const auto ends = [&] { return launch >= first_failed || is_so(); };
    if (!ends() && !look_for(ends)) {
      std::unique_lock lock(mutex);
      ++n_sleeping;
      changed.wait(lock, ends);
      --n_sleeping;
    }
    return launch < first_failed;
  }

  void wake() {
    if (n_sleeping == 0) return;
    {
      const std::lock_guard lock(mutex);
    }
    changed.notify_all();
  }

  void fail(std::size_t launch, std::exception_ptr raised) noexcept {
    {
      const std::lock_guard lock(mutex);
      if (launch < first_failed) {
        std::swap(error, raised);
        first_failed = launch;
      }
      changed.notify_all();
    }
    raised = nullptr;  // outside of the lock: letting go of Python's errors takes the GIL
  }

  StagedLaunches& launches;
  StageWatcher* watcher;
  std::size_t n_launches;
  std::vector<std::atomic<std::size_t>> n_tiled;  // by thread that tiles
  std::atomic<std::size_t> n_addressed = 0;
  std::atomic<std::size_t> first_failed;  // in program order; no launch: none has
  std::atomic<int> n_sleeping = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr error;  // of that launch
};

struct HostStages::Workers {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> threads;
  Pass* pass = nullptr;
  std::atomic<std::uint64_t> n_passes = 0;
  std::size_t n_at_work = 0;
  std::atomic<bool> is_closed = false;
};

HostStages::HostStages(int n_cores, const void* of)
    : n_cores_(n_cores), of_(of), workers_(std::make_unique<Workers>()) {
  if (n_cores < 1) throw std::invalid_argument("stages need at least one core");
  if (n_cores > 1) register_thread_owner(*this);
}

HostStages::~HostStages() {
  if (n_cores_ == 1) return;
  close();
  unregister_thread_owner(*this);
}

void HostStages::run(StagedLaunches& launches, StageWatcher* watcher) {
  if (n_cores_ == 1) return carry_out_inline(launches, watcher);
  const std::lock_guard running(running_);
  start_workers();
  Workers& workers = *workers_;
  Pass pass(launches, watcher, n_cores_ == 2 ? 1 : static_cast<std::size_t>(n_cores_ - 2));
  {
    const std::lock_guard lock(workers.mutex);
    workers.pass = &pass;
    workers.n_at_work = workers.threads.size();
    ++workers.n_passes;
    workers.changed.notify_all();
  }
  if (n_cores_ == 2) {
    pass.write_addresses_and_launch();
  } else {
    pass.launch();
  }
  {
    std::unique_lock lock(workers.mutex);
    workers.changed.wait(lock, [&] { return workers.n_at_work == 0; });
    workers.pass = nullptr;
  }
  if (pass.error) std::rethrow_exception(std::exchange(pass.error, nullptr));
}

// Under running_.
void HostStages::start_workers() {
  Workers& workers = *workers_;
  if (workers.is_closed) {
    throw ExecutionError("the executable is closed, or the interpreter is exiting");
  }
  const auto n_threads = static_cast<std::size_t>(n_cores_ - 1);
  workers.threads.reserve(n_threads);
  while (workers.threads.size() < n_threads) {
    const std::size_t worker = workers.threads.size();
    const std::uint64_t n_seen = workers.n_passes;
    workers.threads.push_back(start_thread("carry out stages of launches",
                                           [this, worker, n_seen] { work(worker, n_seen); }));
  }
}

void HostStages::work(std::size_t worker, std::uint64_t n_seen) {
  helped = of_;
  Workers& workers = *workers_;
  const auto has_news = [&] { return workers.n_passes != n_seen || workers.is_closed; };
  while (true) {
    look_for(has_news);
    std::unique_lock lock(workers.mutex);
    workers.changed.wait(lock, has_news);
    if (workers.n_passes == n_seen) return;  // closed
    n_seen = workers.n_passes;
    Pass& pass = *workers.pass;
    lock.unlock();
    if (worker < pass.n_tiled.size()) {
      pass.tile(worker);
    } else {
      pass.write_addresses();
    }
    lock.lock();
    --workers.n_at_work;
    workers.changed.notify_all();
  }
}

bool HostStages::is_helping_with(const void* of) noexcept {
  return helped != nullptr && helped == of;
}

void HostStages::close() noexcept {
  const std::lock_guard running(running_);
  end_workers();
}

// Under running_, so that no pass is under way.
void HostStages::end_workers() noexcept {
  Workers& workers = *workers_;
  {
    const std::lock_guard lock(workers.mutex);
    workers.is_closed = true;
    workers.changed.notify_all();
  }
  for (std::thread& thread : workers.threads) thread.join();
  workers.threads.clear();
}

// The threads do not exist in the child: they can be neither joined nor woken, and a mutex knows
// its owner by a thread's number. What they had is left as it is, and its few bytes are not freed.
void HostStages::restart() noexcept {
  const bool is_closed = workers_->is_closed;
  Workers* const fresh = new (std::nothrow) Workers;
  static_cast<void>(workers_.release());
  workers_.reset(fresh);
  if (fresh != nullptr) fresh->is_closed = is_closed;
  new (&running_) std::mutex();
}

}  // namespace offload
