// Copies between tensors that move and their memory in a captured model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/runtime.hpp"

namespace offload::acl {

// A tensor whose address differs between executions.
struct MovingTensor {
  std::size_t n_bytes = 0;  // at least one
  bool copied_in = false;   // before the model's kernels
  bool copied_out = false;  // after them
};

// What makes the copies.
enum class CopyForm {
  kCaptured,  // tasks of the model, which read addresses from a table: aclrtMemcpyAsyncWithOffset
  kEnqueued,  // the host, around the model: aclrtMemcpyAsync
};

// The copies so far.
struct CopyCounts {
  RefreshCounts refresh;       // of the table
  std::uint64_t enqueued = 0;  // copies made by the host
};

// Tensors are known by their index. Each has a fixed place, set before its copy is captured, and an
// address, patched by executions.
//
// Owner: one captured model, from before its capture until after its destruction. Thread: callers
// serialise, with the device's context current. Errors: all except patch and counts throw
// ExecutionError; after a failed begin or end, the next one does everything.
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

  // Enqueued work may have failed on the device: the next begin writes all addresses.
  virtual void distrust() noexcept = 0;

  // On the stream of an execution, before and after the model. begin throws while there are tensors
  // without an address or a place; its work is a substage.
  virtual void begin(Stream stream, Submission& submission) = 0;
  virtual void end(Stream stream) = 0;

  virtual CopyCounts counts() const = 0;
};

// Without a form: captured where a trial shows that runtime, chip and firmware can, else enqueued.
// A tensor of more than 4 GiB is captured in several copies. Throws BackendUnavailable for an
// unavailable form, ExecutionError where there is no memory or the trial fails,
// std::invalid_argument for a tensor of no bytes. Needs the device's context current, whose default
// stream it waits for.
std::unique_ptr<MovingCopies> make_moving_copies(const Runtime& runtime,
                                                 const std::vector<MovingTensor>& tensors,
                                                 std::optional<CopyForm> form);

}  // namespace offload::acl
