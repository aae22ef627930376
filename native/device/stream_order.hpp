// What one resident has enqueued on a device's streams, and how much of it has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "offload/fence.hpp"

namespace offload {

// How far the device is; told by fences, which may outlive the resident.
struct StreamProgress {
  std::atomic<std::uint64_t> n_ended{0};
  std::atomic<bool> has_failed{false};  // a wait, since it was asked
};

// Ends what a resident had enqueued so far, by an event of its own.
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

  // A wait that failed, or was refused, ends nothing: what follows is still ordered behind the
  // work, and closing waits for it once more.
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

// Work that goes to one stream at a time: a stream other than the last waits for that, so that
// executions follow one another.
//
// `Streams` is what a device's driver has for it, a value that is copied: types Stream, Code, Event
// (made from Streams), Scope and RelaxedScope (while one lives the device's context is current; by
// the latter also calls pass that a capture would refuse), and
//   record(event, stream), wait(stream, event), synchronize(event), synchronize(stream): Code;
//   ask_capturing(stream, captures&): Code, whether somebody captures the stream into another
//   model; refuse_capturing(stream, which): throws ExecutionError where somebody does; check(code,
//   what): throws ExecutionError with the device's words unless it is kSuccess; is_fault(code): the
//   device failed, and was not merely asked at the wrong time: what it was given does not go on;
//   is_lost(): nothing works in this process any more, which was forked, and nothing is asked.
//
// Owner: one resident. Thread: callers serialise; fences wait on any. Errors: the constructor,
// enter and fence throw ExecutionError. A stream must live until a fence behind its work was waited
// for, or until the next work on another one.
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

  // From here on work goes to `next`, after all before. Throws for one that is being captured.
  void enter(Stream next) {
    const typename Streams::Scope scope(streams_);
    streams_.refuse_capturing(next, "the current stream");
    if (in_flight() && *last_stream_ != next) {
      streams_.refuse_capturing(*last_stream_, "the stream of the execution before");
      streams_.check(streams_.record(*done_, *last_stream_), "recording the execution before");
      streams_.check(streams_.wait(next, *done_), "waiting for the execution before");
    }
    stream_ = next;
    // The caller's copies go there, whether or not the execution comes about.
    note_enqueued();
  }

  // Called before something is enqueued on `stream()`.
  void note_enqueued() {
    last_stream_ = stream_;
    ++n_enqueued_;
  }

  // Where work goes.
  Stream stream() const { return stream_; }

  // Where the last work went, if it may be under way; null: nothing is.
  const Stream* busy_stream() const { return in_flight() ? &*last_stream_ : nullptr; }

  bool in_flight() const { return n_enqueued_ > progress_->n_ended; }

  // Whether a wait has failed since this was last asked, so that what was enqueued before may not
  // have been done.
  bool take_failure() { return progress_->has_failed.exchange(false); }

  // The end of what was enqueued so far; null where nothing is under way. Throws, while the last
  // stream is captured too; once nothing is under way any more, where the device can tell.
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
      // Its own error would come after the first.
      if (streams_.synchronize(*last_stream_) == Streams::kSuccess) {
        progress_->n_ended = n_enqueued_;
      }
      throw;
    }
  }

  // Waits until nothing is under way; enqueues nothing, so that nothing may be any more. False:
  // nobody can wait, as yet. An event that is recorded on a captured stream would become part of
  // another model and tell nothing of what was executed before; and a wait that was refused, by
  // whatever the device says but a fault, ends nothing.
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
        const auto again = streams_.synchronize(*last_stream_);  // others may go on after a fault
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
  std::optional<Stream> last_stream_;  // of the last work
  std::uint64_t n_enqueued_ = 0;       // pieces of work so far, copies included
  std::shared_ptr<StreamProgress> progress_;
  std::optional<typename Streams::Event> done_;
};

}  // namespace offload
