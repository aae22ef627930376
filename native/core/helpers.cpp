#include "offload/helpers.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <new>
#include <thread>

#include "core/start_thread.hpp"
#include "core/woken_elsewhere.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

// Handing an offer to a spinning helper takes 0.1 us, to a sleeping one 50 us.
constexpr auto kLookFor = std::chrono::microseconds(100);
constexpr int kRestsBetweenYields = 32;

// The lock is held for less time than the system call and wake-up of a blocked waiter take.
std::unique_lock<std::mutex> locked(std::mutex& mutex) {
  constexpr int kMostRests = 1000;
  std::unique_lock lock(mutex, std::defer_lock);
  for (int n_rests = 0; n_rests < kMostRests; ++n_rests) {
    if (lock.try_lock()) return lock;
    rest();
  }
  lock.lock();
  return lock;
}

}  // namespace

struct Helpers::Helper {
  std::thread thread;
  std::condition_variable woken;
  WokenElsewhere elsewhere;
  bool is_asleep = false;
};

Helpers::Helpers() = default;

Helpers& Helpers::instance() {
  static auto* const helpers = [] {
    auto* const made = new Helpers;  // never destroyed: its threads may outlive statics
    register_thread_owner(*made);
    return made;
  }();
  return *helpers;
}

void Helpers::offer(const std::shared_ptr<Helped>& work, std::size_t n) noexcept {
  {
    const auto lock = locked(mutex_);
    if (ended_ || n == 0) return;
    try {
      start(n);
      offers_.push_back({work, n});
    } catch (const std::bad_alloc&) {
      return;
    }
    wake(n);
  }
  n_offered_ += n;  // after unlocking, so that a spinning helper finds the lock free
}

// Caller holds the lock.
void Helpers::start(std::size_t n) {
  while (helpers_.size() < n) {
    helpers_.reserve(helpers_.size() + 1);
    auto made = std::make_unique<Helper>();
    try {
      made->thread =
          start_thread("help with executions", [this, helper = made.get()] { run(*helper); });
    } catch (const ExecutionError&) {
      return;
    }
    helpers_.push_back(std::move(made));
  }
}

// Wakes up to `n` helpers that sleep. Caller holds the lock.
void Helpers::wake(std::size_t n) noexcept {
  for (const auto& helper : helpers_) {
    if (n == 0) return;
    if (!helper->is_asleep) continue;
    helper->is_asleep = false;
    helper->elsewhere.will_be_woken();
    helper->woken.notify_one();
    --n;
  }
}

void Helpers::withdraw(const Helped& work) noexcept {
  const auto lock = locked(mutex_);
  for (auto one = offers_.begin(); one != offers_.end();) {
    if (one->work.get() != &work) {
      ++one;
      continue;
    }
    n_offered_ -= one->n_left;
    one = offers_.erase(one);  // not the last reference: the withdrawing caller holds another
  }
}

void Helpers::add(Helped& work) {
  const std::lock_guard lock(mutex_);
  works_.push_back(&work);
}

void Helpers::remove(Helped& work) noexcept {
  const std::lock_guard lock(mutex_);
  works_.erase(std::remove(works_.begin(), works_.end(), &work), works_.end());
}

std::size_t Helpers::n_started() const {
  const std::lock_guard lock(mutex_);
  return helpers_.size();
}

void Helpers::look() {
  ++n_looking_;
  const auto until = std::chrono::steady_clock::now() + kLookFor;
  int n_rests = 0;
  while (n_offered_ == 0 && !ended_) {
    rest();
    if (++n_rests % kRestsBetweenYields != 0) continue;
    if (std::chrono::steady_clock::now() >= until) break;
    std::this_thread::yield();
  }
  --n_looking_;
}

void Helpers::run(Helper& helper) {
  look();
  while (!ended_) {
    std::shared_ptr<Helped> work;
    {
      auto lock = locked(mutex_);
      if (offers_.empty() && !ended_) sleep(lock, helper);
      if (!offers_.empty()) work = take();
    }
    helper.elsewhere.is_awake();
    if (work == nullptr) continue;  // withdrawn, or taken by another helper
    work->help();
    work.reset();
    look();
  }
}

void Helpers::sleep(std::unique_lock<std::mutex>& lock, Helper& helper) {
  helper.elsewhere.sleeps();
  helper.is_asleep = true;
  helper.woken.wait(lock, [&] { return !helper.is_asleep; });
}

// Caller holds the lock, and there is an offer.
std::shared_ptr<Helped> Helpers::take() {
  --n_offered_;
  Offer& first = offers_.front();
  if (--first.n_left > 0) return first.work;
  std::shared_ptr<Helped> work = std::move(first.work);
  offers_.erase(offers_.begin());
  return work;
}

// The parent's threads do not exist here and may be neither joined nor notified.
void Helpers::restart() noexcept {
  new (&helpers_) std::vector<std::unique_ptr<Helper>>();
  new (&mutex_) std::mutex();
  n_offered_ = n_looking_ = 0;
  for (Helped* work : works_) work->abandon();
  std::vector<Offer> dropped;  // may hold the last references
  offers_.swap(dropped);
}

void Helpers::end() noexcept {
  std::vector<std::unique_ptr<Helper>> helpers;
  std::vector<Offer> dropped;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    n_offered_ = 0;
    wake(helpers_.size());
    helpers.swap(helpers_);
    offers_.swap(dropped);
  }
  for (const auto& helper : helpers) helper->thread.join();
}

}  // namespace offload
