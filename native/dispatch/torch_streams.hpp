// Streams of any device that torch supports, by torch's own registry of devices.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "device/captured_stream.hpp"
#include "offload/errors.hpp"

namespace offload {

// The device calls of StreamOrder. Neither CUDA nor torch_npu is linked: torch finds their streams
// and events by the device type (c10/core/impl/VirtualGuardImpl.h).
//
// Captures are not refused: an execution launches what eager mode would, which a capture of the
// stream may record.
struct TorchStreams {
  using Stream = std::optional<c10::Stream>;
  using Code = std::string;  // the device's error message; empty on success

  inline static const Code kSuccess;

  explicit TorchStreams(c10::Device on) : device(on), process(getpid()) {}

  struct Event {
    explicit Event(const TorchStreams& streams) : event(streams.device.type()) {}
    c10::Event event;
  };

  // Makes the device current, by always setting it: on a thread unknown to torch, torch_npu's
  // GetDevice may return device 0 although no device is set. In a forked child it cannot be set.
  class Scope {
   public:
    explicit Scope(const TorchStreams& streams) {
      if (streams.is_lost()) return;
      torch_device_.emplace(streams.device.type());
      before_ = torch_device_->getDevice();
      torch_device_->setDevice(streams.device);
    }
    ~Scope() {
      if (torch_device_) torch_device_->uncheckedSetDevice(*before_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<c10::impl::VirtualGuardImpl> torch_device_;
    std::optional<c10::Device> before_;
  };
  using RelaxedScope = Scope;

  Code record(Event& one, const Stream& stream) const {
    return tried([&] { one.event.record(*stream); });
  }
  Code wait(const Stream& stream, Event& one) const {
    return tried([&] { one.event.block(*stream); });
  }
  Code synchronize(Event& one) const {
    return tried([&] { one.event.synchronize(); });
  }
  Code synchronize(const Stream& stream) const {
    return tried([&] { c10::impl::VirtualGuardImpl(device.type()).synchronizeStream(*stream); });
  }

  Code ask_capturing(const Stream&, bool& captures) const {
    captures = false;
    return kSuccess;
  }
  void refuse_capturing(const Stream&, const char*) const {}
  // Asked only where an event would tie the capture to work outside it, as asking may take long.
  bool joins_capture(const Stream& stream, bool moves) const {
    return moves && is_being_captured(*stream);
  }

  void check(const Code& code, const char* what) const {
    if (code != kSuccess) throw ExecutionError(std::string(what) + " failed: " + code);
  }

  // Memory is torch's, which tracks its users: nothing has to be kept after a failure.
  bool is_fault(const Code&) const { return true; }
  bool is_lost() const { return getpid() != process; }

  c10::Device device;
  pid_t process;

 private:
  template <typename Call>
  static Code tried(Call call) {
    try {
      call();
      return kSuccess;
    } catch (const std::exception& error) {
      const std::string what = error.what();
      return what.empty() ? "the device failed" : what.substr(0, what.find('\n'));
    }
  }
};

}  // namespace offload
