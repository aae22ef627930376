// Copies between tensors that move and the memory in which a captured model has them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// A tensor that an execution finds or leaves somewhere else each time.
struct MovingTensor {
  std::size_t n_bytes = 0;  // at least one
  bool copied_in = false;   // before the model's kernels
  bool copied_out = false;  // after them
};

// Who makes the copies.
enum class CopyForm {
  kCaptured,  // tasks of the model, which read addresses from a table: aclrtMemcpyAsyncWithOffset
  kEnqueued,  // the host, around the model: aclrtMemcpyAsync
};

// What they have taken so far.
struct CopyCounts {
  RefreshCounts refresh;       // of the table
  std::uint64_t enqueued = 0;  // copies that the host made
};

// Tensors are known by their index. Each has a fixed place, which is set before a copy of it is
// captured, and an address that executions patch.
//
// Owner: one captured model, from before its capture until after it was destroyed. Thread: callers
// serialise, with the device's context current. Errors: all but patch and counts throw
// ExecutionError; a begin or end that failed is done whole the next time.
class MovingCopies {
 public:
  virtual ~MovingCopies() = default;

  virtual CopyForm form() const = 0;
  virtual std::size_t size() const = 0;
  virtual void set_place(std::size_t tensor, std::uint64_t place) = 0;

  // On a stream that is being captured, before and after the model's kernels.
  virtual void capture_in(Stream stream) = 0;
  virtual void capture_out(Stream stream) = 0;

  virtual void patch(std::size_t tensor, std::uint64_t address) noexcept = 0;

  // What an execution enqueued may have failed on the device: the next begin writes all addresses.
  virtual void distrust() noexcept = 0;

  // On the stream of an execution, before and after the model. begin throws while there are
  // tensors without an address or a place; what it enqueues is a substage.
  virtual void begin(Stream stream, Submission& submission) = 0;
  virtual void end(Stream stream) = 0;

  virtual CopyCounts counts() const = 0;
};

// No form: captured where runtime, chip and firmware can, which is tried, else enqueued. A tensor
// of more than 4 GiB is captured in several copies. Throws BackendUnavailable for a form that is
// not to be had, ExecutionError where there is no memory or the trial fails, std::invalid_argument
// for a tensor of no bytes. Needs the device's context current, whose default stream it waits for.
std::unique_ptr<MovingCopies> make_moving_copies(const Runtime& runtime,
                                                 const std::vector<MovingTensor>& tensors,
                                                 std::optional<CopyForm> form);

}  // namespace offload::acl
