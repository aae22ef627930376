// Capture: work issued to a stream becomes nodes of a graph. The rules are those that drivers
// document for stream capture.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "graphs.hpp"
#include "streams.hpp"

namespace simulator {

// Which calls a capture forbids: of all threads, of the thread that began it, or none.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  std::uint64_t handle = 0;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  std::shared_ptr<Graph> graph;
  Stream* origin = nullptr;
  bool invalidated = false;
  bool ended = false;
};

// Owner: the device. Thread: under the device's mutex; some rules depend on the calling thread.
// Errors: DeviceError with the broken rule; every capture concerned is then invalidated, and ends
// with kCaptureInvalidated.
class Captures {
 public:
  Captures(Graphs& graphs, Scheduler& scheduler) : graphs_(graphs), scheduler_(scheduler) {}

  // Errors: kCaptureUnsupported on the default stream, kIllegalState where the stream captures.
  void begin(Stream& stream, CaptureMode mode);
  // Errors: kIllegalState where the stream does not capture, kCaptureUnmatched on another stream
  // than the first, kCaptureWrongThread, kCaptureInvalidated, kCaptureUnjoined. All but
  // the first three end the capture.
  std::shared_ptr<Graph> end(Stream& stream);

  // Adds a node after the stream's work. Errors: kCaptureInvalidated.
  void add(Stream& stream, Work work);
  void record(Stream& stream, Event& event);
  // Waits in a capture, or joins one. Errors: kCaptureMerge, kCaptureIsolation, kCapturedEvent.
  void wait(Stream& stream, Event& event);

  // Each throws, and invalidates captures, if the call is not allowed now.
  void require_not_capturing(Stream& stream);     // it would wait for the stream
  void require_default_usable();                  // it uses the default stream
  void require_default_askable() const;           // the same, but nothing is invalidated
  void require_not_captured(const Event& event);  // it queries whether the event was reached
  void require_safe();                            // it may wait for the device
  void require_none();                            // it waits for the device

  // Sets the calling thread's mode, which limits what captures forbid it. Returns the previous
  // mode.
  static CaptureMode exchange_mode(CaptureMode mode);
  // Forgets captures, and the calling thread's mode.
  void reset();

 private:
  void close(Capture& capture);
  bool is_joined(const Capture& capture) const;
  void invalidate(Capture& capture) { capture.invalidated = true; }

  Graphs& graphs_;
  Scheduler& scheduler_;
  Registry<Capture> active_;
};

}  // namespace simulator
