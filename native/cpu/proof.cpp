#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "cpu/cpu_resident.hpp"

namespace offload {
namespace {

// Neither a likely result nor a neutral element, and a NaN in every floating-point format.
constexpr unsigned char kFill = 0xFD;

std::size_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<std::size_t>(last + 1) * tensor.element_size();
}

// How far an out-variant may stray when it takes its output for scratch of its inputs' size.
std::size_t reach_bytes(const CpuLaunch& launch) {
  std::size_t reach = 256;
  for (const at::Tensor& tensor : tensors_on(launch.arguments)) {
    if (tensor.defined()) reach += span_of(tensor);
  }
  return (reach + 63) / 64 * 64;
}

// A tensor like `model` between two guards, everything filled with the pattern.
class GuardedTensor {
 public:
  GuardedTensor(const at::Tensor& model, std::size_t guard_bytes)
      : guard_bytes_(guard_bytes), span_bytes_(span_of(model)) {
    const std::size_t total = 2 * guard_bytes_ + span_bytes_;
    c10::Storage storage(c10::Storage::use_byte_size_t(), total, c10::GetCPUAllocator(), false);
    begin_ = static_cast<unsigned char*>(storage.mutable_data());
    std::memset(begin_, kFill, total);
    TensorLayout layout{model.sizes().vec(), model.strides().vec(), model.scalar_type(),
                        model.is_conj(), model.is_neg()};
    tensor_ = tensor_on(std::move(storage), static_cast<std::int64_t>(guard_bytes_), layout,
                        model.device());
  }

  at::Tensor& tensor() { return tensor_; }

  // Whether exactly the same bytes were written as in a functional result, and none outside. The
  // gaps between strided elements hold the pattern, so comparing them would say nothing: elements
  // are compared through the tensors, by bits.
  bool equals(const at::Tensor& expected) const {
    const auto untouched = [](unsigned char byte) { return byte == kFill; };
    const unsigned char* const begin = begin_;
    const unsigned char* const data = begin + guard_bytes_;
    if (!std::all_of(begin, data, untouched) ||
        !std::all_of(data + span_bytes_, data + span_bytes_ + guard_bytes_, untouched)) {
      return false;
    }
    return tensor_.sizes() == expected.sizes() && tensor_.scalar_type() == expected.scalar_type() &&
           tensor_.is_conj() == expected.is_conj() && tensor_.is_neg() == expected.is_neg() &&
           elements_equal(expected);
  }

 private:
  bool elements_equal(const at::Tensor& expected) const {
    const at::Tensor mine = tensor_.is_contiguous() ? tensor_ : tensor_.contiguous();
    const at::Tensor other = expected.is_contiguous() ? expected : expected.contiguous();
    return mine.nbytes() == 0 ||
           std::memcmp(mine.const_data_ptr(), other.const_data_ptr(), mine.nbytes()) == 0;
  }

  std::size_t guard_bytes_;
  std::size_t span_bytes_;
  unsigned char* begin_;
  at::Tensor tensor_;
};

}  // namespace

CpuMode prove_out_variant(CpuLaunch& launch) {
  std::vector<c10::IValue> stack = launch.arguments;
  launch.call->callBoxed(&stack);
  const std::vector<at::Tensor> expected = tensors_on(stack);
  if (expected.size() != launch.outputs.size()) return CpuMode::kCopied;
  const std::size_t guard_bytes = reach_bytes(launch);
  std::vector<GuardedTensor> guarded;
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& output : launch.outputs) {
    guarded.emplace_back(output, guard_bytes);
    outputs.push_back(guarded.back().tensor());
  }
  try {
    if (launch.thunk != nullptr) {
      launch.thunk(launch.arguments.data(), outputs.data());
    } else {
      std::vector<c10::IValue> out_stack = launch.arguments;
      for (const at::Tensor& output : outputs) out_stack.emplace_back(output);
      launch.out->callBoxed(&out_stack);
    }
  } catch (const std::exception&) {
    return CpuMode::kCopied;  // the functional operator has just worked, so it stays in use
  }
  for (std::size_t index = 0; index < outputs.size(); ++index) {
    if (!expected[index].defined() || !guarded[index].equals(expected[index])) {
      return CpuMode::kCopied;
    }
  }
  return launch.thunk != nullptr ? CpuMode::kThunk : CpuMode::kOut;
}

}  // namespace offload
