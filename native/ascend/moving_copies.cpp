#include "ascend/moving_copies.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ascend/table_copies.hpp"
#include "offload/errors.hpp"

namespace offload::acl {
namespace {

// The limit of one copy that reads its addresses (hicann/runtime, MAX_MEMCPY_SIZE_OF_D2D).
constexpr std::size_t kMostCopyBytes = std::size_t{4} << 30;

// Where chip or firmware lack support, aclrtMemcpyAsyncWithOffset exists and refuses (207000),
// which only a call shows: one copy within 64 bytes of its own tests it. Waits for the copy.
bool copies_by_offset(const Runtime& runtime) {
  constexpr std::size_t kBytes = 64;
  const char* const what = "trying a copy that reads its addresses from memory";
  const RelaxedCapture relaxed(runtime);
  const DeviceMemory tried(runtime, 3 * kBytes, what);
  upload(runtime, tried, std::vector{tried.address() + kBytes, tried.address() + 2 * kBytes}, what);
  auto** const words = static_cast<void**>(tried.data());
  const Error error =
      runtime.memcpy_with_offset(words, kBytes, 0, const_cast<const void**>(words + 1), kBytes, 0,
                                 kInnerDeviceToDevice, /*stream=*/nullptr);
  if (error == kRtFeatureNotSupport) {
    runtime.get_recent_error_message();  // clears it
    return false;
  }
  runtime.check(error, what);
  runtime.check(runtime.synchronize_stream(nullptr), what);
  return true;
}

// The table has two blocks with one word per tensor: addresses, which executions patch, and places.
// Slots and words of its relocations are words of the blocks, the second after the first.
TableParts address_table(std::size_t n_tensors) {
  TableParts parts;
  parts.blocks.assign(2, ArgumentBlock(8 * n_tensors));
  for (std::uint32_t word = 0; word < 2 * n_tensors; ++word) {
    const auto block = static_cast<std::uint32_t>(word / n_tensors);
    parts.words.push_back({block, 8 * (word % n_tensors)});
    parts.relocations.push_back({word, word, 0});
    parts.triggers.push_back(block == 0 ? Trigger::kIo : Trigger::kWeight);
  }
  return parts;
}

class CapturedCopies final : public MovingCopies {
 public:
  CapturedCopies(const Runtime& runtime, const std::vector<MovingTensor>& tensors)
      : runtime_(runtime),
        tensors_(tensors),
        table_(make_host_refresh(runtime, address_table(tensors.size()))) {}

  CopyForm form() const override { return CopyForm::kCaptured; }
  std::size_t size() const override { return tensors_.size(); }

  void set_place(std::size_t tensor, std::uint64_t place) override {
    table_->patch({{static_cast<std::uint32_t>(tensors_.size() + tensor), place}});
  }

  void capture_in(Stream stream) override {
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (tensors_[tensor].copied_in) capture(tensor, place(tensor), address(tensor), stream);
    }
  }

  void capture_out(Stream stream) override {
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (tensors_[tensor].copied_out) capture(tensor, address(tensor), place(tensor), stream);
    }
  }

  void patch(std::size_t tensor, std::uint64_t address) noexcept override {
    table_->patch({{static_cast<std::uint32_t>(tensor), address}});
  }

  void distrust() noexcept override { table_->distrust(); }

  void begin(Stream stream, Submission& submission) override {
    table_->enqueue(stream, submission);
  }
  void end(Stream) override {}

  CopyCounts counts() const override { return {table_->counts(), 0}; }

 private:
  void** word(std::size_t block, std::size_t tensor) const {
    return static_cast<void**>(const_cast<void*>(table_->block(block))) + tensor;
  }
  void** address(std::size_t tensor) const { return word(0, tensor); }
  void** place(std::size_t tensor) const { return word(1, tensor); }

  void capture(std::size_t tensor, void** to, void** from, Stream stream) const {
    const std::size_t n_bytes = tensors_[tensor].n_bytes;
    for (std::size_t at = 0; at < n_bytes; at += kMostCopyBytes) {
      const std::size_t part_bytes = std::min(n_bytes - at, kMostCopyBytes);
      runtime_.check(runtime_.memcpy_with_offset(to, n_bytes, at, const_cast<const void**>(from),
                                                 part_bytes, at, kInnerDeviceToDevice, stream),
                     "capturing the copy of a tensor of " + std::to_string(n_bytes) + " bytes");
    }
  }

  const Runtime& runtime_;
  std::vector<MovingTensor> tensors_;
  std::unique_ptr<TableRefresh> table_;
};

class EnqueuedCopies final : public MovingCopies {
 public:
  EnqueuedCopies(const Runtime& runtime, const std::vector<MovingTensor>& tensors)
      : runtime_(runtime), tensors_(tensors), places_(tensors.size()), addresses_(tensors.size()) {}

  CopyForm form() const override { return CopyForm::kEnqueued; }
  std::size_t size() const override { return tensors_.size(); }
  void set_place(std::size_t tensor, std::uint64_t place) override { places_.at(tensor) = place; }
  void capture_in(Stream) override {}
  void capture_out(Stream) override {}

  void patch(std::size_t tensor, std::uint64_t address) noexcept override {
    addresses_[tensor] = address;
  }

  void distrust() noexcept override {}  // each execution enqueues all copies

  void begin(Stream stream, Submission& submission) override {
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (places_[tensor] == 0 || addresses_[tensor] == 0) {
        throw ExecutionError("tensor " + std::to_string(tensor) +
                             " of a captured model has no place or was never bound");
      }
    }
    const std::uint64_t n_before = n_enqueued_;
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (tensors_[tensor].copied_in) copy(tensor, places_, addresses_, stream);
    }
    if (n_enqueued_ > n_before) submission.end_substage(kInputCopies);
  }

  void end(Stream stream) override {
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      if (tensors_[tensor].copied_out) copy(tensor, addresses_, places_, stream);
    }
  }

  CopyCounts counts() const override { return {{}, n_enqueued_}; }

 private:
  void copy(std::size_t tensor, const std::vector<std::uint64_t>& to,
            const std::vector<std::uint64_t>& from, Stream stream) {
    const std::size_t n_bytes = tensors_[tensor].n_bytes;
    runtime_.check(runtime_.memcpy_async(reinterpret_cast<void*>(to[tensor]), n_bytes,
                                         reinterpret_cast<const void*>(from[tensor]), n_bytes,
                                         kDeviceToDevice, stream),
                   "copying a tensor of " + std::to_string(n_bytes) + " bytes");
    ++n_enqueued_;
  }

  const Runtime& runtime_;
  std::vector<MovingTensor> tensors_;
  std::vector<std::uint64_t> places_;
  std::vector<std::uint64_t> addresses_;
  std::uint64_t n_enqueued_ = 0;
};

}  // namespace

std::unique_ptr<MovingCopies> make_moving_copies(const Runtime& runtime,
                                                 const std::vector<MovingTensor>& tensors,
                                                 std::optional<CopyForm> form) {
  for (const MovingTensor& tensor : tensors) {
    if (tensor.n_bytes == 0) throw std::invalid_argument("a tensor of no bytes is not copied");
  }
  const bool is_captured = form != CopyForm::kEnqueued && runtime.has(Capability::kMemcpyOffset) &&
                           (tensors.empty() || copies_by_offset(runtime));
  if (is_captured) return std::make_unique<CapturedCopies>(runtime, tensors);
  if (form != CopyForm::kCaptured) return std::make_unique<EnqueuedCopies>(runtime, tensors);
  runtime.require(Capability::kMemcpyOffset, "capturing copies whose addresses move");
  throw BackendUnavailable(
      "capturing copies whose addresses move: this chip or its firmware refuses copies that read "
      "their addresses from memory (aclrtMemcpyAsyncWithOffset: 207000; Ascend 310P and 310B do "
      "not support them): let the host copy (copies='enqueued', or copies= left out)");
}

}  // namespace offload::acl
