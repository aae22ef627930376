#include "run/operator_calls.hpp"

#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <array>
#include <charconv>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "offload/dtype_name.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

void flatten_into(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor.value_or(at::Tensor()));
    }
  } else {
    tensors.emplace_back();
  }
}

// A value that was read on the host; numbers with their sign, and so that they read back exactly.
std::string shown(const c10::IValue& value) {
  std::ostringstream text;
  if (!value.isDouble()) {
    text << value;
    return text.str();
  }
  std::array<char, 32> digits;
  const auto [end, _] =
      std::to_chars(digits.data(), digits.data() + digits.size(), value.toDouble());
  text << std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data()));
  if (text.str().find_first_not_of("-0123456789") == std::string::npos) text << ".0";
  return text.str();
}

bool has_layout(const at::Tensor& tensor, const TensorLayout& layout, std::int64_t offset_bytes) {
  return tensor.sizes() == c10::IntArrayRef(layout.shape) && tensor.scalar_type() == layout.dtype &&
         same_strides(tensor, layout) &&
         tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size()) ==
             offset_bytes &&
         tensor.is_conj() == layout.conjugate && tensor.is_neg() == layout.negative;
}

// Describes a launch's result against the recorded layout.
std::string told_apart(const at::Tensor& result, const TensorLayout& layout,
                       std::int64_t offset_bytes) {
  std::ostringstream message;
  if (result.defined()) {
    message << "returned shape " << result.sizes() << " with strides " << result.strides() << " of "
            << dtype_name(result.scalar_type()) << " from byte "
            << result.storage_offset() * static_cast<std::int64_t>(result.element_size()) << " on"
            << (result.is_conj() ? ", conjugated" : "") << (result.is_neg() ? ", negated" : "");
  } else {
    message << "returned no tensor";
  }
  message << ", the recorded result has shape " << c10::IntArrayRef(layout.shape)
          << " with strides " << c10::IntArrayRef(layout.strides) << " of "
          << dtype_name(layout.dtype) << " from byte " << offset_bytes << " on"
          << (layout.conjugate ? ", conjugated" : "") << (layout.negative ? ", negated" : "");
  return message.str();
}

bool equals(const c10::IValue& found, const c10::IValue& recorded) {
  if (found.isDouble() && recorded.isDouble()) {
    const double one = found.toDouble();
    const double other = recorded.toDouble();
    return std::memcmp(&one, &other, sizeof one) == 0;  // -0.0 is not 0.0, a NaN equals itself
  }
  if (found.isInt() && recorded.isInt()) return found.toInt() == recorded.toInt();
  if (found.isBool() && recorded.isBool()) return found.toBool() == recorded.toBool();
  if (found.isComplexDouble() && recorded.isComplexDouble()) {
    const auto one = found.toComplexDouble();
    const auto other = recorded.toComplexDouble();
    return std::memcmp(&one, &other, sizeof one) == 0;
  }
  return false;
}

// A Program from a file is not compared with the caller's default dtype, which torch's operators
// read where neither an argument nor an operand gives a dtype.
bool is_of_another_default(c10::ScalarType found, c10::ScalarType recorded) {
  return found != recorded && c10::isFloatingType(recorded) &&
         found == c10::get_default_dtype_as_scalartype();
}

// torch's host allocator has no exception class for this (c10/core/impl/alloc_cpu.cpp).
bool tells_of_no_memory(const std::exception& error) {
  if (dynamic_cast<const OutOfMemory*>(&error) || dynamic_cast<const std::bad_alloc*>(&error) ||
      dynamic_cast<const c10::OutOfMemoryError*>(&error)) {
    return true;
  }
  const std::string what = error.what();
  return what.find("DefaultCPUAllocator: can't allocate memory") != std::string::npos ||
         what.find("DefaultCPUAllocator: not enough memory") != std::string::npos;
}

}  // namespace

c10::OperatorHandle find_operator(const std::string& name, const std::string& overload) {
  auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) {
    throw std::invalid_argument("operator " + name + (overload.empty() ? "" : "." + overload) +
                                " does not exist in this torch");
  }
  return *found;
}

std::vector<at::Tensor> tensors_on(const std::vector<c10::IValue>& stack) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : stack) flatten_into(value, tensors);
  return tensors;
}

void check_result(const at::Tensor& result, const TensorLayout& layout, std::int64_t offset_bytes,
                  bool guards_shape, const std::string& launch) {
  if (result.defined() && has_layout(result, layout, offset_bytes)) return;
  const std::string told = told_apart(result, layout, offset_bytes);
  if (guards_shape) throw BindingError(launch + ": " + told);
  if (result.defined() && result.sizes() == c10::IntArrayRef(layout.shape)) {
    if (is_of_another_default(result.scalar_type(), layout.dtype)) {
      throw BindingError(launch + ": " + told + "; the default dtype is " +
                         dtype_name(result.scalar_type()) + " now: if it was " +
                         dtype_name(layout.dtype) +
                         " at the recording, call torch.set_default_dtype with that before loading "
                         "and calling the program; if the operator is your own, correct its fake "
                         "implementation");
    }
    // No input causes this: the program does not match the operator.
    throw CaptureError(launch + ": " + told +
                       "; if the operator is your own, correct its fake implementation");
  }
  throw ExecutionError(told);
}

void check_guard(const c10::IValue& found, const c10::IValue& recorded, const std::string& source,
                 const std::string& operator_name) {
  if (equals(found, recorded)) return;
  throw BindingError(source + ": " + operator_name + " read " + shown(found) +
                     " on the host, the recorded value is " + shown(recorded) +
                     "; capture again for this value, or avoid the read");
}

void rethrow_of_launch(const std::string& launch) {
  try {
    throw;
  } catch (const BindingError&) {
    throw;
  } catch (const CaptureError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    const std::string told = launch + ": " + what.substr(0, what.find('\n'));
    if (tells_of_no_memory(error)) std::throw_with_nested(OutOfMemory(told));
    std::throw_with_nested(ExecutionError(told));
  }
}

}  // namespace offload
