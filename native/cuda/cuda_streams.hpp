// The Streams type of the CUDA driver; see StreamOrder.
#pragma once

#include <memory>
#include <utility>

#include "cuda/arena.hpp"

namespace offload::cuda {

// The streams of one device, in the context of an arena, which this keeps alive.
//
// Owner: copied. Thread: any. Errors: check and refuse_capturing throw ExecutionError.
class CudaStreams {
 public:
  using Stream = cuda::Stream;
  using Code = Result;
  static constexpr Code kSuccess = cuda::kSuccess;
  static constexpr const char* kDevice = "a CUDA device";

  class Event : public OrderEvent {
   public:
    explicit Event(const CudaStreams& streams) : OrderEvent(streams.driver()) {}
  };

  class Scope {
   public:
    explicit Scope(const CudaStreams& streams)
        : scope_(streams.driver(), streams.arena_->context()) {}

   private:
    ContextScope scope_;
  };

  class RelaxedScope {
   public:
    explicit RelaxedScope(const CudaStreams& streams)
        : scope_(streams.driver(), streams.arena_->context()), relaxed_(streams.driver()) {}

   private:
    ContextScope scope_;
    RelaxedCapture relaxed_;
  };

  explicit CudaStreams(std::shared_ptr<CudaArena> arena) : arena_(std::move(arena)) {}

  Code record(const Event& event, Stream stream) const {
    return driver().event_record(event.handle(), stream);
  }
  Code wait(Stream stream, const Event& event) const {
    return driver().stream_wait_event(stream, event.handle(), 0);
  }
  Code synchronize(const Event& event) const { return driver().event_synchronize(event.handle()); }
  Code synchronize(Stream stream) const { return driver().stream_synchronize(stream); }

  Code ask_capturing(Stream stream, bool& captures) const {
    CaptureStatus status = kCaptureNone;
    const Code code = driver().stream_is_capturing(stream, &status);
    captures = code == kSuccess && status != kCaptureNone;
    return code;
  }
  bool joins_capture(Stream stream, bool) const {
    refuse_capturing(stream, "the current stream");
    return false;
  }
  void refuse_capturing(Stream stream, const char* which) const {
    cuda::refuse_capturing(driver(), stream, which);
  }
  void check(Code code, const char* what) const { driver().check(code, what); }

  static bool is_fault(Code code) { return cuda::is_fault(code); }

  // In the child of a fork the driver itself refuses calls.
  bool is_lost() const { return false; }

 private:
  const Driver& driver() const { return arena_->driver(); }

  std::shared_ptr<CudaArena> arena_;
};

}  // namespace offload::cuda
