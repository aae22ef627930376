#include "offload/alarm.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "core/start_thread.hpp"
#include "offload/clock.hpp"

namespace offload {

Alarm& Alarm::instance() {
  static auto* const alarm = [] {
    auto* const made = new Alarm;  // never destroyed: its thread may outlive statics
    register_thread_owner(*made);
    return made;
  }();
  return *alarm;
}

void Alarm::call_at(std::uint64_t at_ns, std::weak_ptr<Woken> woken) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  try {
    if (!thread_.joinable()) thread_ = start_thread("wake late devices", [this] { run(); });
    calls_.push_back({at_ns, std::move(woken)});
  } catch (const std::exception&) {
    return;
  }
  std::push_heap(calls_.begin(), calls_.end());
  if (calls_.front().at_ns == at_ns) changed_.notify_one();
}

void Alarm::run() {
  std::unique_lock lock(mutex_);
  while (!ended_) {
    if (calls_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const std::uint64_t now = now_ns();
    const std::uint64_t at_ns = calls_.front().at_ns;
    if (now < at_ns) {
      changed_.wait_for(lock, std::chrono::nanoseconds(at_ns - now));
      continue;
    }
    std::pop_heap(calls_.begin(), calls_.end());
    const std::weak_ptr<Woken> woken = std::move(calls_.back().woken);
    calls_.pop_back();
    lock.unlock();
    if (const std::shared_ptr<Woken> found = woken.lock()) found->ring();
    lock.lock();
  }
}

// The parent's thread does not exist here and may be neither joined nor notified.
void Alarm::restart() noexcept {
  new (&thread_) std::thread();
  new (&changed_) std::condition_variable();
  new (&mutex_) std::mutex();
  calls_.clear();
}

void Alarm::end() noexcept {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    calls_.clear();
    thread = std::move(thread_);
    changed_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

}  // namespace offload
