#include "captures.hpp"

#include <algorithm>
#include <set>

namespace simulator {
namespace {

thread_local CaptureMode thread_mode = CaptureMode::kGlobal;

// Of the programming guide, "Use in CUDA Graphs" of programmatic dependent launch: a kernel that
// was launched with programmatic stream serialisation has an edge of the programmatic type from
// the programmatic port (1 and 1 in cuda.h); by CUgraphDependencyType there only between kernels.
constexpr EdgeKind kProgrammatic{1, 0, 1};

void merge(std::vector<std::uint64_t>& frontier, const std::vector<std::uint64_t>& others) {
  for (const std::uint64_t node : others) {
    if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) {
      frontier.push_back(node);
    }
  }
}

}  // namespace

CaptureMode Captures::exchange_mode(CaptureMode mode) { return std::exchange(thread_mode, mode); }

void Captures::reset() {
  active_.clear();
  thread_mode = CaptureMode::kGlobal;
}

void Captures::begin(Stream& stream, CaptureMode mode) {
  require(!scheduler_.is_default(stream), Status::kCaptureUnsupported);
  require(stream.capture == nullptr, Status::kIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = graphs_.create();
  capture->origin = &stream;
  stream.capture = active_.add(std::move(capture));
  stream.frontier.clear();
}

// The streams leave the capture; its graph stays.
void Captures::close(Capture& capture) {
  for (const auto& stream : scheduler_.all()) {
    if (stream->capture.get() != &capture) continue;
    stream->frontier.clear();
    stream->capture.reset();
  }
  capture.ended = true;
  active_.remove(capture.handle);
}

// Everything that other streams added precedes the first stream's frontier.
bool Captures::is_joined(const Capture& capture) const {
  std::set<std::uint64_t> reached;
  std::vector<std::uint64_t> pending = capture.origin->frontier;
  while (!pending.empty()) {
    const std::uint64_t handle = pending.back();
    pending.pop_back();
    if (!reached.insert(handle).second) continue;
    for (const std::uint64_t other : graphs_.node(handle)->dependencies) pending.push_back(other);
  }
  for (const auto& stream : scheduler_.all()) {
    if (stream->capture.get() != &capture) continue;
    for (const std::uint64_t node : stream->frontier) {
      if (reached.count(node) == 0) return false;
    }
  }
  return true;
}

std::shared_ptr<Graph> Captures::end(Stream& stream) {
  const auto capture = stream.capture;
  require(capture != nullptr, Status::kIllegalState);
  require(capture->origin == &stream, Status::kCaptureUnmatched);
  require(capture->mode == CaptureMode::kRelaxed || capture->thread == std::this_thread::get_id(),
          Status::kCaptureWrongThread);
  const bool joined = is_joined(*capture);
  close(*capture);
  if (capture->invalidated || !joined) {
    graphs_.destroy(capture->graph->handle);
    throw DeviceError(capture->invalidated ? Status::kCaptureInvalidated
                                           : Status::kCaptureUnjoined);
  }
  return capture->graph;
}

void Captures::add(Stream& stream, Work work) {
  require(!stream.capture->invalidated, Status::kCaptureInvalidated);
  const auto* const call = std::get_if<KernelCall>(&work);
  const bool overlaps = call != nullptr && call->overlaps;
  const auto node = graphs_.add(*stream.capture->graph, std::move(work), stream.frontier);
  for (const std::uint64_t before : stream.frontier) {
    if (!overlaps || !std::holds_alternative<KernelCall>(graphs_.node(before)->work)) continue;
    node->edge_kinds[before] = kProgrammatic;
  }
  stream.frontier = {node->handle};
}

void Captures::record(Stream& stream, Event& event) {
  require(!stream.capture->invalidated, Status::kCaptureInvalidated);
  event.capture = stream.capture;
  event.frontier = stream.frontier;
}

void Captures::wait(Stream& stream, Event& event) {
  if (event.capture == nullptr) {  // recorded outside every capture, or never
    if (event.mark == nullptr) return;
    invalidate(*stream.capture);
    throw DeviceError(Status::kCaptureIsolation);
  }
  require(!event.capture->ended, Status::kCapturedEvent);
  require(!event.capture->invalidated, Status::kCaptureInvalidated);
  if (stream.capture == nullptr) {
    stream.capture = event.capture;
    stream.frontier = event.frontier;
    return;
  }
  if (stream.capture != event.capture) {
    invalidate(*stream.capture);
    invalidate(*event.capture);
    throw DeviceError(Status::kCaptureMerge);
  }
  merge(stream.frontier, event.frontier);
}

void Captures::require_not_capturing(Stream& stream) {
  if (stream.capture == nullptr) return;
  invalidate(*stream.capture);
  throw DeviceError(Status::kCaptureUnsupported);
}

void Captures::require_default_usable() {
  bool usable = true;
  for (const auto& stream : scheduler_.all()) {
    if (stream->capture == nullptr || !stream->blocking) continue;
    invalidate(*stream->capture);
    usable = false;
  }
  require(usable, Status::kCaptureImplicit);
}

void Captures::require_default_askable() const {
  for (const auto& stream : scheduler_.all()) {
    require(stream->capture == nullptr || !stream->blocking, Status::kCaptureImplicit);
  }
}

void Captures::require_not_captured(const Event& event) {
  if (event.capture == nullptr) return;
  if (!event.capture->ended) invalidate(*event.capture);
  throw DeviceError(Status::kCapturedEvent);
}

void Captures::require_safe() {
  if (thread_mode == CaptureMode::kRelaxed) return;
  bool safe = true;
  for (const auto& capture : active_.all()) {
    if (capture->mode == CaptureMode::kRelaxed) continue;
    const bool own = capture->thread == std::this_thread::get_id();
    const bool everywhere =
        capture->mode == CaptureMode::kGlobal && thread_mode == CaptureMode::kGlobal;
    if (!own && !everywhere) continue;
    invalidate(*capture);
    safe = false;
  }
  require(safe, Status::kCaptureUnsupported);
}

void Captures::require_none() {
  const auto captures = active_.all();
  for (const auto& capture : captures) invalidate(*capture);
  require(captures.empty(), Status::kCaptureUnsupported);
}

}  // namespace simulator
