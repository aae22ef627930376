// Errors of the simulated device. A skin gives each its own error code.
#pragma once

#include <stdexcept>

namespace simulator {

enum class Status {
  kInvalidValue,
  kInvalidHandle,
  kOutOfMemory,
  kAlreadyRegistered,  // memory of the host
  kNotRegistered,
  kNotReady,            // work is still queued
  kIllegalState,        // the object is in another state than the call needs
  kIllegalAddress,      // a fault of the device: sticky
  kLaunchFailed,        // a kernel failed: sticky
  kOverlap,             // two executions of an object that runs once at a time: sticky
  kBlocked,             // the work waits for something that was not issued
  kCaptureUnsupported,  // not while a stream captures
  kCaptureInvalidated,  // an earlier error ended the capture
  kCaptureMerge,        // two captures would become one
  kCaptureUnmatched,    // ended on another stream than it began on
  kCaptureUnjoined,     // forked work was not joined
  kCaptureIsolation,    // would depend on work outside the capture
  kCaptureImplicit,     // the default stream would depend on a capture
  kCapturedEvent,       // the event was last recorded in a capture
  kCaptureWrongThread,
};

// Thrown by every part of the core; a skin catches it where its C functions begin.
class DeviceError : public std::runtime_error {
 public:
  explicit DeviceError(Status reason) : std::runtime_error("simulated device"), status(reason) {}
  const Status status;
};

// Throws DeviceError(status) unless `holds`.
inline void require(bool holds, Status status) {
  if (!holds) throw DeviceError(status);
}

}  // namespace simulator
