// Threads beside the lanes, which a fork has to find at rest and interpreter exit has to end.
#pragma once

namespace offload {

// Something with threads of its own that executions wait for.
//
// Owner: whoever made it; it must be unregistered before it goes. Thread: hold, release and
// restart are called inside fork, on the forking thread, after every lane is held (so that no
// execution of another thread is under way) and in the order of registration; end at interpreter
// exit, after the lanes have ended. Errors: none.
class ThreadOwner {
 public:
  // Before a fork: waits until its threads touch nothing, and keeps them there.
  virtual void hold() noexcept = 0;

  // After it, in the parent.
  virtual void release() noexcept = 0;

  // After it, in the child, where its threads do not exist: starts anew.
  virtual void restart() noexcept = 0;

  // Ends its threads for good.
  virtual void end() noexcept = 0;

 protected:
  ~ThreadOwner() = default;
};

// Both wait while another thread forks. The caller must not hold the GIL. An owner that registers
// when the interpreter exits is told to end at once.
void register_thread_owner(ThreadOwner& owner);
void unregister_thread_owner(ThreadOwner& owner) noexcept;

}  // namespace offload
