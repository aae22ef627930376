// Threads besides the lanes, which must be at rest at a fork and end at interpreter exit.
#pragma once

namespace offload {

// An object with its own threads, for which executions wait.
//
// Owner: its creator; it must be unregistered before it is destroyed. Thread: hold, release and
// restart are called on the forking thread, hold after every lane is held (so that no other thread
// is executing), inside fork or just before it (`Lane::hold_for_fork`), in the order of
// registration; end at interpreter exit, after the lanes have ended. Errors: none.
class ThreadOwner {
 public:
  // Before a fork: waits until its threads touch nothing, and keeps them so.
  virtual void hold() noexcept = 0;

  // After a fork, in the parent.
  virtual void release() noexcept = 0;

  // After a fork, in the child, where its threads do not exist: starts again.
  virtual void restart() noexcept = 0;

  // Ends its threads permanently.
  virtual void end() noexcept = 0;

 protected:
  ~ThreadOwner() = default;
};

// Both wait while another thread forks. The caller must not hold the GIL. `end` is called at once
// on an owner that registers while the interpreter exits.
void register_thread_owner(ThreadOwner& owner);
void unregister_thread_owner(ThreadOwner& owner) noexcept;

}  // namespace offload
