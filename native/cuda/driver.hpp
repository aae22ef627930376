// The CUDA driver, opened at run time: its functions, errors and contexts.
#pragma once

#include <string>

#include "cuda/driver_abi.hpp"

namespace offload::cuda {

// Whether it is a code after which the context is unusable: those whose texts in cuda.h of CUDA
// 13.0 ask to end the process or the context, a destroyed context, a driver that shuts down, and
// uncorrectable memory and link errors.
bool is_fault(Result code);

// The function table of libcuda.so.1.
//
// Owner: the process; never closed, since static objects may still use it. Thread: any. Errors: get
// throws BackendUnavailable; check, fail and their variants throw OutOfMemory if the device's
// memory is exhausted, otherwise ExecutionError.
class Driver {
 public:
  // Opens the library, resolves every function and initialises the driver; done once, and retried
  // after a failure. Throws BackendUnavailable naming the missing library, symbol or version, or
  // why the driver does not start.
  static const Driver& get();

  // Throws with the code's name and text, what was attempted, and the remedy after a fault.
  void check(Result result, const char* what) const {
    if (result != kSuccess) fail(result, what);
  }

  // Like check, with the number of requested bytes if memory is exhausted.
  void check_memory(Result result, std::size_t n_bytes, const char* what) const {
    if (result != kSuccess) fail_memory(result, n_bytes, what);
  }

  [[noreturn]] void fail(Result result, const std::string& what) const;
  [[noreturn]] void fail_memory(Result result, std::size_t n_bytes, const char* what) const;

  // "CUDA_ERROR_INVALID_VALUE (invalid argument)".
  std::string describe(Result result) const;

#define OFFLOAD_DECLARE(name, symbol, version, signature) Result(*name) signature = nullptr;
  OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE

 private:
  void open();
};

// A device's primary context, shared with torch, retained while this lives.
//
// Thread: any. Errors: the constructor throws BackendUnavailable for a device that does not exist
// or lacks virtual memory management, ExecutionError if the context cannot be made.
class PrimaryContext {
 public:
  PrimaryContext(const Driver& driver, int device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  Context handle() const { return context_; }
  Device device() const { return device_; }

 private:
  const Driver& driver_;
  Device device_ = 0;
  Context context_ = nullptr;
};

// Makes a context current on this thread while it lives.
//
// Owner: a stack frame. Errors: none; a failure to set the context surfaces in the next call.
class ContextScope {
 public:
  ContextScope(const Driver& driver, const PrimaryContext& context) : driver_(driver) {
    driver_.context_get_current(&before_);
    changed_ = before_ != context.handle();
    if (changed_) driver_.context_set_current(context.handle());
  }
  ~ContextScope() {
    if (changed_) driver_.context_set_current(before_);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  Context before_ = nullptr;
  bool changed_ = false;
};

// While it lives, permits calls on this thread that a stream capture would refuse, since they do
// not concern the captured work.
//
// Owner: a stack frame. Errors: none.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    changed_ = driver_.exchange_capture_mode(&mode_) == kSuccess;
  }
  ~RelaxedCapture() {
    if (changed_) driver_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  CaptureMode mode_ = kCaptureRelaxed;  // afterwards the mode before
  bool changed_ = false;
};

// Throws ExecutionError if a stream is being captured into another graph; `which` describes the
// stream. Needs a current context.
void refuse_capturing(const Driver& driver, Stream stream, const char* which);

// A stream without implicit ordering with others.
//
// Owner: one object; needs a current context while it is made and destroyed. Errors: the
// constructor throws ExecutionError.
class OwnStream {
 public:
  explicit OwnStream(const Driver& driver);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream handle() const { return stream_; }

 private:
  const Driver& driver_;
  Stream stream_ = nullptr;
};

// An event without timing.
//
// Owner: one object; needs a current context while it is made. Errors: the constructor throws
// ExecutionError.
class OrderEvent {
 public:
  explicit OrderEvent(const Driver& driver);
  ~OrderEvent();
  OrderEvent(const OrderEvent&) = delete;
  OrderEvent& operator=(const OrderEvent&) = delete;

  Event handle() const { return event_; }

 private:
  const Driver& driver_;
  Event event_ = nullptr;
};

}  // namespace offload::cuda
