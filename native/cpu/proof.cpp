#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "cpu/cpu_resident.hpp"

namespace offload {
namespace {

// Unlikely as a result, not a neutral element, and a NaN in every floating-point format.
constexpr unsigned char kFill = 0xFD;

std::size_t aligned(std::size_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

TensorLayout layout_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.is_conj(),
          tensor.is_neg()};
}

// The reach of a wrong out-variant that uses its output as scratch of its inputs' size. Our own
// thunks do not; a narrow guard keeps their proof cheap beside large weights.
std::size_t reach_bytes(const CpuLaunch& launch) {
  std::size_t reach = 256;
  if (launch.thunk != nullptr) return reach;
  for (const at::Tensor& tensor : tensors_on(launch.arguments)) {
    if (tensor.defined()) reach += layout_of(tensor).span_bytes();
  }
  return aligned(reach);
}

// Stands for one storage of the real run: its outputs, and copies of its arguments, since kernels
// test whether two tensors share a storage. Guards lie between all of them.
class Rehearsal {
 public:
  explicit Rehearsal(std::size_t guard_bytes) : guard_bytes_(guard_bytes) {}

  // Reserves room for a tensor like this one; the content of arguments is copied.
  void place(const at::Tensor& tensor, bool is_argument) {
    const std::size_t span = layout_of(tensor).span_bytes();
    size_bytes_ += guard_bytes_;
    places_.push_back({tensor, size_bytes_, span, is_argument});
    size_bytes_ += aligned(span);
  }

  void build() {
    size_bytes_ += guard_bytes_;
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), size_bytes_, c10::GetCPUAllocator(),
                            /*resizable=*/false);
    auto* const begin = static_cast<unsigned char*>(storage_.mutable_data());
    std::memset(begin, kFill, size_bytes_);
    for (const Place& place : places_) {
      if (place.is_argument && place.span_bytes > 0) {
        std::memcpy(begin + place.offset_bytes, place.real.const_data_ptr(), place.span_bytes);
      }
    }
  }

  // The stand-in for a tensor that was placed.
  at::Tensor stand_in(const at::Tensor& real) const {
    for (const Place& place : places_) {
      if (place.real.is_same(real)) {
        return tensor_on(storage_, static_cast<std::int64_t>(place.offset_bytes), layout_of(real),
                         real.device());
      }
    }
    return real;
  }

  // Whether only the outputs were written: guards hold the pattern, arguments their content.
  bool intact() const {
    const auto* const begin = static_cast<const unsigned char*>(storage_.data());
    std::size_t checked = 0;
    for (const Place& place : places_) {
      if (!holds_fill(begin + checked, begin + place.offset_bytes)) return false;
      if (place.is_argument && place.span_bytes > 0 &&
          std::memcmp(begin + place.offset_bytes, place.real.const_data_ptr(), place.span_bytes)) {
        return false;
      }
      checked = place.offset_bytes + place.span_bytes;
    }
    return holds_fill(begin + checked, begin + size_bytes_);
  }

 private:
  struct Place {
    at::Tensor real;
    std::size_t offset_bytes;
    std::size_t span_bytes;
    bool is_argument;
  };

  static bool holds_fill(const unsigned char* begin, const unsigned char* end) {
    return std::all_of(begin, end, [](unsigned char byte) { return byte == kFill; });
  }

  std::size_t guard_bytes_;
  std::size_t size_bytes_ = 0;
  std::vector<Place> places_;
  c10::Storage storage_;
};

class SilentWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override { ++n_warnings; }

  int n_warnings = 0;
};

using Rehearsals = std::map<const c10::StorageImpl*, Rehearsal>;

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

Rehearsals make_rehearsals(const CpuLaunch& launch) {
  const std::size_t guard_bytes = reach_bytes(launch);
  Rehearsals rehearsals;
  for (const at::Tensor& output : launch.outputs) {
    rehearsals.try_emplace(storage_of(output), guard_bytes).first->second.place(output, false);
  }
  for (const at::Tensor& argument : tensors_on(launch.arguments)) {
    if (!argument.defined()) continue;
    const auto found = rehearsals.find(storage_of(argument));
    if (found != rehearsals.end()) found->second.place(argument, true);
  }
  for (auto& [storage, rehearsal] : rehearsals) rehearsal.build();
  return rehearsals;
}

at::Tensor stand_in(const Rehearsals& rehearsals, const at::Tensor& real) {
  if (!real.defined()) return real;
  const auto found = rehearsals.find(storage_of(real));
  return found == rehearsals.end() ? real : found->second.stand_in(real);
}

c10::IValue stand_in(const Rehearsals& rehearsals, const c10::IValue& argument) {
  if (argument.isTensor()) return stand_in(rehearsals, argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : argument.toTensorVector()) {
      list.push_back(stand_in(rehearsals, tensor));
    }
    return list;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(stand_in(rehearsals, *tensor)) : std::nullopt);
    }
    return list;
  }
  return argument;
}

}  // namespace

bool same_elements(const at::Tensor& one, const at::Tensor& other) {
  if (one.sizes() != other.sizes() || one.scalar_type() != other.scalar_type() ||
      one.is_conj() != other.is_conj() || one.is_neg() != other.is_neg()) {
    return false;
  }
  const at::Tensor first = one.contiguous();
  const at::Tensor second = other.contiguous();
  return first.nbytes() == 0 ||
         std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes()) == 0;
}

CpuMode prove_out_variant(CpuLaunch& launch) {
  SilentWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  std::vector<c10::IValue> stack = launch.arguments;
  launch.call->callBoxed(&stack);
  const std::vector<at::Tensor> expected = tensors_on(stack);
  if (expected.size() != launch.outputs.size()) return CpuMode::kCopied;
  const Rehearsals rehearsals = make_rehearsals(launch);
  std::vector<c10::IValue> arguments;
  for (const c10::IValue& argument : launch.arguments) {
    arguments.push_back(stand_in(rehearsals, argument));
  }
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& output : launch.outputs) outputs.push_back(stand_in(rehearsals, output));
  const int n_usual = std::exchange(silent.n_warnings, 0);
  try {
    if (launch.thunk != nullptr) {
      launch.thunk(arguments.data(), outputs.data());
    } else {
      arguments.insert(arguments.end(), outputs.begin(), outputs.end());
      launch.out->callBoxed(&arguments);
    }
  } catch (const std::exception&) {
    return CpuMode::kCopied;  // the functional operator has just succeeded, so it stays in use
  }
  // An out-variant that resizes its output, even temporarily, warns, and would at each execution.
  if (silent.n_warnings > n_usual) return CpuMode::kCopied;
  for (std::size_t index = 0; index < outputs.size(); ++index) {
    if (!expected[index].defined() || !same_elements(outputs[index], expected[index])) {
      return CpuMode::kCopied;
    }
  }
  for (const auto& [storage, rehearsal] : rehearsals) {
    if (!rehearsal.intact()) return CpuMode::kCopied;
  }
  return launch.thunk != nullptr ? CpuMode::kThunk : CpuMode::kOut;
}

}  // namespace offload
