// A thread that keeps everything at rest until another one forks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "core/start_thread.hpp"

namespace offload {

// Holds everything at rest for a thread that is about to fork. Python calls the handlers of others
// before that fork, and these may wait for a thread that waits for a lane: then it lets go after a
// while, and the fork waits itself.
//
// Owner: the thread that forks. The child of the fork leaves it, as it has no such thread.
// Thread: all of it on its owner's; `hold` and `release` are called on its own.
// Errors: ExecutionError if no thread can be started.
class RestKeeper {
 public:
  // Returns once `hold` has returned.
  RestKeeper(std::function<void()> hold, std::function<void()> release)
      : hold_(std::move(hold)),
        release_(std::move(release)),
        thread_(start_thread("wait for launches before a fork", [this] { run(); })) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_held_; });
  }
  RestKeeper(const RestKeeper&) = delete;
  RestKeeper& operator=(const RestKeeper&) = delete;

  // Lets go, if it has not.
  ~RestKeeper() {
    set(is_over_);
    thread_.join();
  }

  // Lets go after a while from now. Without it nothing is let go: until it has the GIL the thread
  // that is to fork calls no handler, and others may have the GIL for long, as to collect garbage.
  void limit() { set(is_limited_); }

  // Whether everything is at rest. If so it remains so until the destructor.
  bool keep() {
    set(is_kept_);
    const std::lock_guard lock(mutex_);
    return !has_let_go_;
  }

 private:
  static constexpr auto kKept = std::chrono::milliseconds(100);

  void set(bool& flag) {
    const std::lock_guard lock(mutex_);
    flag = true;
    changed_.notify_all();
  }

  void run() {
    hold_();
    std::unique_lock lock(mutex_);
    is_held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return is_limited_ || is_kept_ || is_over_; });
    changed_.wait_for(lock, kKept, [this] { return is_kept_ || is_over_; });
    if (is_kept_) {
      changed_.wait(lock, [this] { return is_over_; });
    } else {
      has_let_go_ = true;
    }
    lock.unlock();
    release_();
  }

  const std::function<void()> hold_;
  const std::function<void()> release_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_held_ = false;
  bool is_limited_ = false;
  bool is_kept_ = false;
  bool has_let_go_ = false;
  bool is_over_ = false;
  std::thread thread_;  // last, as it uses the others
};

}  // namespace offload
