// Waiting for work on a device that returns before the work is done.
#pragma once

namespace offload {

// The end of all that a resident had enqueued when this was made.
//
// Owner: the waiting caller; may outlive the resident. Thread: any, one at a time. Errors: wait
// throws ExecutionError if the device failed.
class Fence {
 public:
  virtual ~Fence() = default;

  // Blocks until that work has ended. Needs no lock, so the resident can execute meanwhile.
  virtual void wait() = 0;
};

}  // namespace offload
