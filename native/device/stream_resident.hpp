// What all residents on devices with streams share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "device/stream_order.hpp"
#include "offload/errors.hpp"
#include "offload/resident.hpp"

namespace offload {

// A resident whose work goes to one stream at a time. `Streams` as in StreamOrder, with kDevice,
// the kind of device in words ("a CUDA device").
//
// Owner, thread, errors: as Resident. The constructor throws ExecutionError. Execute and issue
// enqueue on the stream and return; a device fault surfaces at a fence, or at any later call. A
// stream must live until a fence after its work was waited for, or until the next execution on
// another stream. A derived class calls close_for_good in its destructor.
//
// While the stream of the last execution is being captured into another model, earlier work cannot
// be waited for. Then fence throws; close refuses further executions but releases nothing yet; and
// destruction leaves the memory allocated until the process ends. The same holds for a wait that
// the device refuses, and permanently for what the parent of a forked process had loaded.
template <typename Streams>
class StreamResident : public Resident, public DeviceStreams {
 public:
  c10::Storage take(std::size_t) final {
    throw ExecutionError(std::string("on ") + Streams::kDevice +
                         " the Plan places everything: no operator allocates");
  }

  DeviceStreams* device_streams() final { return this; }

  void set_stream(std::uint64_t stream) final {
    refuse_closed();
    order_.enter(reinterpret_cast<Stream>(stream));
  }

  std::unique_ptr<Fence> fence() final { return order_.fence(); }

  // Waits until all executions have ended. Throws ExecutionError if the device failed.
  void finish() {
    if (const std::unique_ptr<Fence> end = fence()) end->wait();
  }

  void close() noexcept final {
    is_closed_ = true;
    if (is_abandoned_ || !order_.end()) return;
    const typename Streams::RelaxedScope scope(streams_);
    release();
  }

  // Closes for the last time and abandons what cannot be waited for. Returns whether everything was
  // released: if not, the device may still use what the caller keeps for it.
  bool close_for_good() noexcept {
    close();
    if (is_abandoned_ || !(order_.in_flight() || streams_.is_lost())) return !is_abandoned_;
    is_abandoned_ = true;
    const typename Streams::Scope scope(streams_);
    abandon();
    return false;
  }

 protected:
  using Stream = typename Streams::Stream;

  explicit StreamResident(Streams streams) : streams_(std::move(streams)), order_(streams_) {}

  // Releases what it holds on the device, whose context is current, once no work is in flight.
  // Called at the first close and at each later one.
  virtual void release() noexcept = 0;

  // Drops, without releasing it, what work in flight may still read and write.
  virtual void abandon() noexcept = 0;

  void refuse_closed() const {
    if (is_closed_) throw ExecutionError("the program was closed: load it again");
  }

  // Called before work is enqueued on the stream that set_stream chose.
  void note_enqueued() { order_.note_enqueued(); }

  // Whether a wait has failed since the last call, so that earlier enqueued work may not have been
  // done.
  bool take_failure() { return order_.take_failure(); }

  Stream stream() const { return order_.stream(); }
  const Stream* busy_stream() const { return order_.busy_stream(); }
  const Streams& streams() const { return streams_; }

 private:
  Streams streams_;
  StreamOrder<Streams> order_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
};

}  // namespace offload
