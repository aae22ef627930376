#include "ascend/stream_resident.hpp"

#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

// Ends what a resident had enqueued so far, by an event of its own.
class AscendFence final : public Fence {
 public:
  AscendFence(const Runtime& runtime, const Device& device, std::unique_ptr<OrderEvent> event,
              std::uint64_t n_enqueued, std::shared_ptr<std::atomic<std::uint64_t>> n_ended,
              std::shared_ptr<std::atomic<bool>> has_failed)
      : runtime_(runtime),
        device_(device),
        event_(std::move(event)),
        n_enqueued_(n_enqueued),
        n_ended_(std::move(n_ended)),
        has_failed_(std::move(has_failed)) {}

  ~AscendFence() override {
    const ContextScope scope(runtime_, device_);
    event_.reset();
  }

  void wait() override {
    const ContextScope scope(runtime_, device_);
    const RelaxedCapture relaxed(runtime_);
    // After a wait that failed the work may go on: what follows is still ordered behind it.
    const Error error = runtime_.synchronize_event(event_->handle());
    if (error != kSuccess) *has_failed_ = true;
    runtime_.check(error, "executing the program");
    std::uint64_t n_known = *n_ended_;
    while (n_known < n_enqueued_ && !n_ended_->compare_exchange_weak(n_known, n_enqueued_)) {
    }
  }

 private:
  const Runtime& runtime_;
  Device device_;
  std::unique_ptr<OrderEvent> event_;
  std::uint64_t n_enqueued_;
  std::shared_ptr<std::atomic<std::uint64_t>> n_ended_;
  std::shared_ptr<std::atomic<bool>> has_failed_;
};

}  // namespace

StreamResident::StreamResident(int device, bool copies_on_device)
    : runtime_(Runtime::get()),
      device_(runtime_, device),
      copies_on_device_(copies_on_device),
      n_ended_(std::make_shared<std::atomic<std::uint64_t>>(0)),
      has_failed_(std::make_shared<std::atomic<bool>>(false)) {
  const ContextScope scope(runtime_, device_);
  done_.emplace(runtime_);
}

StreamResident::~StreamResident() {
  const ContextScope scope(runtime_, device_);
  done_.reset();
}

void StreamResident::refuse_closed() const {
  if (is_closed_) throw ExecutionError("the program was closed");
}

void StreamResident::note_enqueued() {
  last_stream_ = stream_;
  ++n_enqueued_;
}

c10::DataPtr StreamResident::take(std::size_t) {
  throw ExecutionError("on an Ascend device the Plan places everything: no operator allocates");
}

bool StreamResident::copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) {
  refuse_closed();
  if (!copies_on_device_) return false;
  if (n_bytes == 0) return true;
  const ContextScope scope(runtime_, device_);
  runtime_.check(
      runtime_.memcpy_async(reinterpret_cast<void*>(to), n_bytes, reinterpret_cast<void*>(from),
                            n_bytes, kDeviceToDevice, stream_),
      "copying to or from a buffer");
  note_enqueued();
  return true;
}

Error StreamResident::ask_capturing(Stream stream, bool& captures) const {
  captures = false;
  if (stream == nullptr || !runtime_.has(Capability::kCapture)) return kSuccess;
  CaptureStatus status = kCaptureNone;
  Model model = nullptr;
  const Error error = runtime_.capture_get_info(stream, &status, &model);
  captures = status != kCaptureNone;
  return error;
}

void StreamResident::refuse_capturing(Stream stream, const char* which) const {
  bool captures = false;
  runtime_.check(ask_capturing(stream, captures), "asking whether the stream captures");
  if (!captures) return;
  throw ExecutionError(std::string(which) +
                       " is being captured into another model, where the addresses of an execution "
                       "cannot be patched: execute outside the capture");
}

void StreamResident::set_stream(std::uint64_t stream) {
  refuse_closed();
  const auto next = reinterpret_cast<Stream>(stream);
  const ContextScope scope(runtime_, device_);
  refuse_capturing(next, "the current stream");
  if (in_flight() && *last_stream_ != next) {
    refuse_capturing(*last_stream_, "the stream of the execution before");
    runtime_.check(runtime_.record_event(done_->handle(), *last_stream_),
                   "recording the execution before");
    runtime_.check(runtime_.wait_event(next, done_->handle()), "waiting for the execution before");
  }
  stream_ = next;
  // From here on the caller's copies go there, whether or not the execution comes about.
  note_enqueued();
}

std::unique_ptr<Fence> StreamResident::fence() {
  if (!in_flight()) return nullptr;
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  refuse_capturing(*last_stream_, "the stream of the execution before");
  try {
    auto event = std::make_unique<OrderEvent>(runtime_);
    runtime_.check(runtime_.record_event(event->handle(), *last_stream_), "ending an execution");
    return std::make_unique<AscendFence>(runtime_, device_, std::move(event), n_enqueued_, n_ended_,
                                         has_failed_);
  } catch (const ExecutionError&) {
    *has_failed_ = true;
    // Its own error would come after the first.
    if (runtime_.synchronize_stream(*last_stream_) == kSuccess) *n_ended_ = n_enqueued_;
    throw;
  }
}

void StreamResident::finish() {
  if (const std::unique_ptr<Fence> end = fence()) end->wait();
}

// An event that is recorded on a capturing stream would become part of another model, and tell
// nothing of what was executed before.
bool StreamResident::wait_for_end() noexcept {
  if (runtime_.is_forked()) return false;
  if (!in_flight()) return true;
  bool captures = false;
  if (ask_capturing(*last_stream_, captures) == kSuccess && captures) return false;
  if (runtime_.record_event(done_->handle(), *last_stream_) == kSuccess) {
    runtime_.synchronize_event(done_->handle());
  } else {
    runtime_.synchronize_stream(*last_stream_);
  }
  *n_ended_ = n_enqueued_;
  return true;
}

void StreamResident::close() noexcept {
  const ContextScope scope(runtime_, device_);
  const RelaxedCapture relaxed(runtime_);
  is_closed_ = true;
  if (!wait_for_end()) return;
  release();
  done_.reset();
}

void StreamResident::close_for_good() noexcept {
  close();
  if (!in_flight() && !runtime_.is_forked()) return;
  const ContextScope scope(runtime_, device_);
  abandon();
}

}  // namespace offload::acl
