// Streams, events and capture.
#include "driver.hpp"

namespace simulated_cuda {

using simulator::Status;

namespace {

std::shared_ptr<simulator::Stream> get(simulator::Device& device, Stream stream) {
  return device.scheduler.get(as_number(stream));
}

std::shared_ptr<simulator::Event> get(simulator::Device& device, Event event) {
  return device.events.get(as_number(event), Status::kInvalidHandle);
}

// Work is always late: a query finds it undone, and the next query finds it done.
bool run_if_queued(simulator::Device& device, const std::shared_ptr<simulator::Stream>& stream) {
  if (device.scheduler.is_idle(*stream)) return false;
  device.scheduler.run(stream);
  return true;
}

void require_usable(simulator::Device& device, const std::shared_ptr<simulator::Stream>& stream) {
  device.captures.require_not_capturing(*stream);
  if (device.scheduler.is_default(*stream)) device.captures.require_default_usable();
}

}  // namespace

Result stream_create(Stream* stream, unsigned int flags) {
  constexpr unsigned int kNonBlocking = 1;
  return call("cuStreamCreate", Needs::kContext, [&](simulator::Device& device) {
    require_given(stream);
    simulator::require(flags <= kNonBlocking, Status::kInvalidValue);
    *stream = as_handle<Stream>(device.scheduler.create(flags != kNonBlocking)->handle);
  });
}

Result stream_destroy(Stream stream) {
  return call("cuStreamDestroy", Needs::kContext, [&](simulator::Device& device) {
    simulator::require(!device.scheduler.is_default(*get(device, stream)), Status::kInvalidHandle);
    device.destroy_stream(as_number(stream));
  });
}

Result stream_synchronize(Stream stream) {
  return call("cuStreamSynchronize", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, stream);
    require_usable(device, found);
    device.scheduler.run(found);
  });
}

Result stream_query(Stream stream) {
  return call("cuStreamQuery", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, stream);
    require_usable(device, found);
    simulator::require(!run_if_queued(device, found), Status::kNotReady);
  });
}

Result stream_wait_event(Stream stream, Event event, unsigned int flags) {
  return call("cuStreamWaitEvent", Needs::kContext, [&](simulator::Device& device) {
    simulator::require(flags == 0, Status::kInvalidValue);
    device.wait(*get(device, stream), *get(device, event));
  });
}

Result stream_begin_capture(Stream stream, CaptureMode mode) {
  return call("cuStreamBeginCapture", Needs::kContext, [&](simulator::Device& device) {
    simulator::require(mode >= kCaptureGlobal && mode <= kCaptureRelaxed, Status::kInvalidValue);
    device.captures.begin(*get(device, stream), static_cast<simulator::CaptureMode>(mode));
  });
}

Result stream_end_capture(Stream stream, Graph* graph) {
  return call("cuStreamEndCapture", Needs::kContext, [&](simulator::Device& device) {
    require_given(graph);
    *graph = nullptr;
    *graph = as_handle<Graph>(device.captures.end(*get(device, stream))->handle);
  });
}

namespace {

CaptureStatus status_of(const simulator::Stream& stream) {
  if (stream.capture == nullptr) return kCaptureNone;
  return stream.capture->invalidated ? kCaptureInvalidated : kCaptureActive;
}

void put_info(const simulator::Stream& stream, CaptureStatus* status, std::uint64_t* id,
              Graph* graph, const GraphNode** dependencies, std::size_t* n_dependencies) {
  require_given(status);
  *status = status_of(stream);
  if (*status != kCaptureActive) return;
  if (id != nullptr) *id = stream.capture->handle;
  if (graph != nullptr) *graph = as_handle<Graph>(stream.capture->graph->handle);
  if (n_dependencies != nullptr) *n_dependencies = stream.frontier.size();
  if (dependencies == nullptr) return;
  static_assert(sizeof(GraphNode) == sizeof(std::uint64_t));
  *dependencies = reinterpret_cast<const GraphNode*>(stream.frontier.data());
}

}  // namespace

Result stream_is_capturing(Stream stream, CaptureStatus* status) {
  return call("cuStreamIsCapturing", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, stream);
    if (device.scheduler.is_default(*found)) device.captures.require_default_askable();
    put_info(*found, status, nullptr, nullptr, nullptr, nullptr);
  });
}

Result stream_get_capture_info(Stream stream, CaptureStatus* status, std::uint64_t* id,
                               Graph* graph, const GraphNode** dependencies,
                               std::size_t* n_dependencies) {
  return call("cuStreamGetCaptureInfo", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, stream);
    if (device.scheduler.is_default(*found)) device.captures.require_default_askable();
    put_info(*found, status, id, graph, dependencies, n_dependencies);
  });
}

Result stream_get_capture_info_v3(Stream stream, CaptureStatus* status, std::uint64_t* id,
                                  Graph* graph, const GraphNode** dependencies,
                                  const EdgeData** edges, std::size_t* n_dependencies) {
  std::size_t count = 0;
  const Result result = stream_get_capture_info(stream, status, id, graph, dependencies, &count);
  if (n_dependencies != nullptr) *n_dependencies = count;
  // No edge carries data, but clients read as many as there are dependencies.
  thread_local std::vector<EdgeData> data;
  data.assign(count, EdgeData{});
  if (edges != nullptr) *edges = data.data();
  return result;
}

Result exchange_capture_mode(CaptureMode* mode) {
  // A thread's mode is not device state: it can be restored after a fault.
  return call("cuThreadExchangeStreamCaptureMode", Needs::kNothing, [&](auto&) {
    require_given(mode);
    simulator::require(*mode >= kCaptureGlobal && *mode <= kCaptureRelaxed, Status::kInvalidValue);
    *mode = static_cast<CaptureMode>(
        simulator::Captures::exchange_mode(static_cast<simulator::CaptureMode>(*mode)));
  });
}

Result event_create(Event* event, unsigned int flags) {
  constexpr unsigned int kDisableTiming = 2;
  return call("cuEventCreate", Needs::kContext, [&](simulator::Device& device) {
    require_given(event);
    auto created = std::make_shared<simulator::Event>();
    created->timed = (flags & kDisableTiming) == 0;
    *event = as_handle<Event>(device.events.add(std::move(created))->handle);
  });
}

Result event_destroy(Event event) {
  return call("cuEventDestroy", Needs::kContext,
              [&](simulator::Device& device) { device.events.remove(get(device, event)->handle); });
}

Result event_record(Event event, Stream stream) {
  return call("cuEventRecord", Needs::kContext, [&](simulator::Device& device) {
    device.record(*get(device, stream), *get(device, event));
  });
}

Result event_query(Event event) {
  return call("cuEventQuery", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, event);
    device.captures.require_not_captured(*found);
    device.captures.require_safe();
    if (found->mark == nullptr || found->mark->done) return;
    device.scheduler.run_until(found->mark);
    throw simulator::DeviceError(Status::kNotReady);
  });
}

Result event_synchronize(Event event) {
  return call("cuEventSynchronize", Needs::kContext, [&](simulator::Device& device) {
    const auto found = get(device, event);
    device.captures.require_not_captured(*found);
    device.captures.require_safe();
    if (found->mark != nullptr) device.scheduler.run_until(found->mark);
  });
}

Result event_elapsed_time(float* milliseconds, Event begin, Event end) {
  return call("cuEventElapsedTime", Needs::kContext, [&](simulator::Device& device) {
    require_given(milliseconds);
    const auto first = get(device, begin);
    const auto second = get(device, end);
    for (const auto& event : {first, second}) {
      device.captures.require_not_captured(*event);
      simulator::require(event->timed && event->mark != nullptr, Status::kInvalidHandle);
      simulator::require(event->mark->done, Status::kNotReady);
    }
    constexpr double kNsInMs = 1e6;
    const std::int64_t elapsed_ns = second->mark->at_ns - first->mark->at_ns;
    *milliseconds = static_cast<float>(static_cast<double>(elapsed_ns) / kNsInMs);
  });
}

}  // namespace simulated_cuda
