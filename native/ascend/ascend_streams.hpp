// The calls of the Ascend runtime for an order of work; see StreamOrder.
#pragma once

#include "ascend/runtime.hpp"

namespace offload::acl {

// The streams of one device.
//
// Owner: copied. Thread: any. Errors: check and refuse_capturing throw ExecutionError.
class AscendStreams {
 public:
  using Stream = acl::Stream;
  using Code = Error;
  static constexpr Code kSuccess = acl::kSuccess;
  static constexpr const char* kDevice = "an Ascend device";

  class Event : public OrderEvent {
   public:
    explicit Event(const AscendStreams& streams) : OrderEvent(streams.runtime()) {}
  };

  class Scope {
   public:
    explicit Scope(const AscendStreams& streams) : scope_(streams.runtime(), streams.device()) {}

   private:
    ContextScope scope_;
  };

  class RelaxedScope {
   public:
    explicit RelaxedScope(const AscendStreams& streams)
        : scope_(streams.runtime(), streams.device()), relaxed_(streams.runtime()) {}

   private:
    ContextScope scope_;
    RelaxedCapture relaxed_;
  };

  AscendStreams(const Runtime& runtime, int device)
      : runtime_(&runtime), device_(runtime, device) {}

  Code record(const Event& event, Stream stream) const {
    return runtime_->record_event(event.handle(), stream);
  }
  Code wait(Stream stream, const Event& event) const {
    return runtime_->wait_event(stream, event.handle());
  }
  Code synchronize(const Event& event) const { return runtime_->synchronize_event(event.handle()); }
  Code synchronize(Stream stream) const { return runtime_->synchronize_stream(stream); }

  Code ask_capturing(Stream stream, bool& captures) const;
  bool joins_capture(Stream stream, bool) const {
    refuse_capturing(stream, "the current stream");
    return false;
  }
  void refuse_capturing(Stream stream, const char* which) const;
  void check(Code code, const char* what) const { runtime_->check(code, what); }

  // Whether the code states a failure of tasks or of the device (documentation of CANN: exceptions,
  // traps and timeouts of its processors, aborts, memory and link errors).
  static bool is_fault(Code code);
  bool is_lost() const { return runtime_->is_forked(); }

  const Runtime& runtime() const { return *runtime_; }
  const Device& device() const { return device_; }

 private:
  const Runtime* runtime_;
  Device device_;
};

}  // namespace offload::acl
