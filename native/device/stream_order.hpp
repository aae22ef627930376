// What a resident has enqueued on a device's streams, and how much of it has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "offload/fence.hpp"

namespace offload {

// Progress of the device, updated by fences, which may outlive the resident.
struct StreamProgress {
  std::atomic<std::uint64_t> n_ended{0};
  std::atomic<bool> has_failed{false};  // a wait failed since take_failure was last called
};

// Waits for all that a resident had enqueued, by its own event.
//
// Owner, thread, errors: as Fence.
template <typename Streams>
class StreamFence final : public Fence {
 public:
  StreamFence(Streams streams, std::unique_ptr<typename Streams::Event> event,
              std::uint64_t n_enqueued, std::shared_ptr<StreamProgress> progress)
      : streams_(std::move(streams)),
        event_(std::move(event)),
        n_enqueued_(n_enqueued),
        progress_(std::move(progress)) {}

  ~StreamFence() override {
    const typename Streams::Scope scope(streams_);
    event_.reset();
  }

  // A failed or refused wait marks nothing as ended: later work is still ordered after this work,
  // and close waits for it again.
  void wait() override {
    const typename Streams::RelaxedScope scope(streams_);
    const auto code = streams_.synchronize(*event_);
    if (code != Streams::kSuccess) progress_->has_failed = true;
    streams_.check(code, "executing the program");
    std::uint64_t n_known = progress_->n_ended;
    while (n_known < n_enqueued_ &&
           !progress_->n_ended.compare_exchange_weak(n_known, n_enqueued_)) {
    }
  }

 private:
  Streams streams_;
  std::unique_ptr<typename Streams::Event> event_;
  std::uint64_t n_enqueued_;
  std::shared_ptr<StreamProgress> progress_;
};

// Serialises work that goes to one stream at a time: when the stream changes, the new stream waits
// for the last one, so that executions follow one another.
//
// `Streams` is a copyable value that stands for a device's driver. It has the types Stream, Code,
// Event (constructed from Streams), Scope and RelaxedScope (while a scope lives the device's
// context is current; RelaxedScope also permits calls that a capture would refuse), and
//   record(event, stream), wait(stream, event), synchronize(event), synchronize(stream): Code;
//   ask_capturing(stream, captures&): Code; whether the stream is captured into another model;
//   refuse_capturing(stream, which): throws ExecutionError if it is;
//   joins_capture(stream, moves): bool; whether work there becomes part of the caller's capture,
//     which matters only if work `moves` there from another stream. Throws ExecutionError if the
//     stream is being captured and work cannot become part of it;
//   check(code, what): throws ExecutionError with the device's message unless code is kSuccess;
//   is_fault(code): the device failed and does not continue, rather than refusing a call now;
//   is_lost(): this process was forked: nothing works in it any more, and no call is made.
//
// Owner: one resident. Thread: callers serialise; fences wait on any. Errors: the constructor,
// enter and fence throw ExecutionError. A stream must live until a fence after its work was waited
// for, or until the next work on another stream.
template <typename Streams>
class StreamOrder {
 public:
  using Stream = typename Streams::Stream;

  explicit StreamOrder(Streams streams)
      : streams_(std::move(streams)), progress_(std::make_shared<StreamProgress>()) {
    const typename Streams::Scope scope(streams_);
    done_.emplace(streams_);
  }

  ~StreamOrder() {
    const typename Streams::Scope scope(streams_);
    done_.reset();
  }

  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Directs work to `next`, after all earlier work. Work that joins the caller's capture on another
  // stream waits for none: the caller executes it elsewhere and later. Throws if that stream is
  // being captured and work cannot join.
  void enter(Stream next) {
    const typename Streams::Scope scope(streams_);
    const bool moves = in_flight() && *last_stream_ != next;
    joins_capture_ = streams_.joins_capture(next, moves);
    if (moves && !joins_capture_) {
      streams_.refuse_capturing(*last_stream_, "the stream of the execution before");
      streams_.check(streams_.record(*done_, *last_stream_), "recording the execution before");
      streams_.check(streams_.wait(next, *done_), "waiting for the execution before");
    }
    stream_ = next;
    // The caller's copies go there even if the execution does not take place.
    note_enqueued();
  }

  // Called before work is enqueued on `stream()`.
  void note_enqueued() {
    if (joins_capture_) return;
    last_stream_ = stream_;
    ++n_enqueued_;
  }

  // The stream that work goes to.
  Stream stream() const { return stream_; }

  // The stream of the last work, or null if no work is in flight.
  const Stream* busy_stream() const { return in_flight() ? &*last_stream_ : nullptr; }

  bool in_flight() const { return n_enqueued_ > progress_->n_ended; }

  // Whether a wait has failed since the last call, so that earlier enqueued work may not have been
  // done.
  bool take_failure() { return progress_->has_failed.exchange(false); }

  // A fence after all enqueued work; null if none is in flight. Throws also while the last stream
  // is being captured. On other errors it throws after the work has ended, where the device can
  // tell.
  std::unique_ptr<Fence> fence() {
    if (!in_flight()) return nullptr;
    const typename Streams::RelaxedScope scope(streams_);
    streams_.refuse_capturing(*last_stream_, "the stream of the execution before");
    try {
      auto event = std::make_unique<typename Streams::Event>(streams_);
      streams_.check(streams_.record(*event, *last_stream_), "ending an execution");
      return std::make_unique<StreamFence<Streams>>(streams_, std::move(event), n_enqueued_,
                                                    progress_);
    } catch (...) {
      progress_->has_failed = true;
      // A second error would only hide the first.
      if (streams_.synchronize(*last_stream_) == Streams::kSuccess) {
        progress_->n_ended = n_enqueued_;
      }
      throw;
    }
  }

  // Waits until no work is in flight; nothing may be enqueued afterwards. Returns false if waiting
  // is not possible yet. An event recorded on a captured stream would become part of another model
  // and say nothing about earlier work. A refused wait (any error but a fault) ends nothing.
  bool end() noexcept {
    if (streams_.is_lost()) return false;
    const typename Streams::RelaxedScope scope(streams_);
    if (in_flight()) {
      bool captures = false;
      auto code = streams_.ask_capturing(*last_stream_, captures);
      if (captures) return false;
      if (code == Streams::kSuccess) code = streams_.record(*done_, *last_stream_);
      if (code == Streams::kSuccess) code = streams_.synchronize(*done_);
      if (code != Streams::kSuccess) {
        const auto again = streams_.synchronize(*last_stream_);  // may outlast a fault
        if (!streams_.is_fault(code)) code = again;
      }
      if (code != Streams::kSuccess && !streams_.is_fault(code)) return false;
      progress_->n_ended = n_enqueued_;
    }
    done_.reset();
    return true;
  }

 private:
  Streams streams_;
  Stream stream_ = Stream();
  bool joins_capture_ = false;         // work becomes part of the caller's capture
  std::optional<Stream> last_stream_;  // of the latest work
  std::uint64_t n_enqueued_ = 0;       // pieces of work so far, copies included
  std::shared_ptr<StreamProgress> progress_;
  std::optional<typename Streams::Event> done_;
};

}  // namespace offload
