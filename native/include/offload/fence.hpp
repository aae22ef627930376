// The end of work on a device that returns before its work is done.
#pragma once

namespace offload {

// A moment of a resident: the end of all that it had enqueued when this was made.
//
// Owner: whoever waits; may outlive the resident. Thread: any, one at a time. Errors: wait throws
// ExecutionError if the device failed.
class Fence {
 public:
  virtual ~Fence() = default;

  // Blocks until the moment has come. Needs no lock, so that the resident executes meanwhile.
  virtual void wait() = 0;
};

}  // namespace offload
