// What every resident on an Ascend device does with streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "ascend/runtime.hpp"
#include "offload/resident.hpp"

namespace offload::acl {

// A resident whose work goes to one stream at a time: a stream other than the last waits for that,
// so that executions follow one another, and no refresh overtakes an execution.
//
// Owner, thread, errors: as Resident. The constructor throws BackendUnavailable and ExecutionError.
// Execute and issue enqueue on the stream and return; a device fault surfaces at a fence, or at any
// later call. A stream must live until a fence behind its work was waited for, or until the next
// execution on another one. Whoever derives calls close_for_good in its destructor.
//
// While the stream of the last execution is being captured into another model nobody can wait for
// what was executed there before: fence throws, close refuses executions from then on but gives
// nothing back yet, and what is destroyed then leaves its memory to the process. In the child of a
// fork it is the same for good, and executions are refused.
class StreamResident : public Resident {
 public:
  ~StreamResident() override;
  c10::DataPtr take(std::size_t slot) final;
  void set_stream(std::uint64_t stream) final;
  bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) final;
  std::unique_ptr<Fence> fence() final;
  void close() noexcept final;

  // Waits until what was executed has ended. Throws ExecutionError if the device failed.
  void finish();

 protected:
  // `copies_on_device`: tensors lie in the device's memory, so that `copy` copies them there.
  StreamResident(int device, bool copies_on_device);

  // Gives back what it holds on the device, whose context is current, once nothing is under way;
  // the first time, and whenever it is closed again.
  virtual void release() noexcept = 0;

  // Lets go of what work that may be under way still reads and writes, without giving it back.
  virtual void abandon() noexcept = 0;

  // Closes; abandons what cannot be waited for.
  void close_for_good() noexcept;

  void refuse_closed() const;

  // Called before something is enqueued on the stream that set_stream chose.
  void note_enqueued();

  // Whether a wait has failed since this was last asked, so that what was enqueued before may not
  // have been done.
  bool take_failure() { return has_failed_->exchange(false); }

  Stream stream() const { return stream_; }
  const Runtime& runtime() const { return runtime_; }
  const Device& device() const { return device_; }

 private:
  Error ask_capturing(Stream stream, bool& captures) const;
  void refuse_capturing(Stream stream, const char* which) const;
  bool wait_for_end() noexcept;  // false: nobody can, as yet
  bool in_flight() const { return n_enqueued_ > *n_ended_; }

  const Runtime& runtime_;
  Device device_;
  bool copies_on_device_;
  Stream stream_ = nullptr;
  std::optional<Stream> last_stream_;  // of the last execution and the copies around it
  std::uint64_t n_enqueued_ = 0;       // pieces of work so far, copies included
  std::shared_ptr<std::atomic<std::uint64_t>> n_ended_;  // of them; told by fences
  std::shared_ptr<std::atomic<bool>> has_failed_;        // since it was asked; told by fences
  std::optional<OrderEvent> done_;
  bool is_closed_ = false;
};

}  // namespace offload::acl
