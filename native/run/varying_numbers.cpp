#include "run/varying_numbers.hpp"

#include <algorithm>
#include <stdexcept>

namespace offload {
namespace {

// Bytes from the first element to one past the last.
std::int64_t span_bytes(const std::vector<std::int64_t>& numbers, std::int64_t item_bytes) {
  const std::size_t n_axes = numbers.size() / 2;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < n_axes; ++axis) {
    if (numbers[axis] == 0) return 0;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(numbers[axis] - 1, numbers[n_axes + axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      throw ExpressionError("a tensor overflows 64 bits");
    }
  }
  std::int64_t n_bytes = 0;
  if (__builtin_mul_overflow(last + 1, item_bytes, &n_bytes)) {
    throw ExpressionError("a tensor overflows 64 bits");
  }
  return n_bytes;
}

}  // namespace

void set_numbers(std::vector<std::int64_t>& numbers, const std::vector<VaryingNumber>& varying,
                 const SizedProgram& sizes) {
  for (const auto& [position, expression] : varying) {
    numbers[position] = sizes.numbers[expression].integer;
  }
}

void set_layout(TensorLayout& layout, std::int64_t& offset_bytes,
                const std::vector<VaryingNumber>& varying, const SizedProgram& sizes) {
  const std::size_t n_axes = layout.shape.size();
  for (const auto& [at, expression] : varying) {
    const std::int64_t number = sizes.numbers[expression].integer;
    (at < n_axes       ? layout.shape[at]
     : at < 2 * n_axes ? layout.strides[at - n_axes]
                       : offset_bytes) = number;
  }
}

bool is_empty(const std::vector<std::int64_t>& numbers) {
  const auto end_of_sizes = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  return std::find(numbers.begin(), end_of_sizes, 0) != end_of_sizes;
}

void check_reach(const std::vector<std::int64_t>& numbers, std::int64_t item_bytes,
                 std::size_t room_bytes) {
  for (const std::int64_t number : numbers) {
    if (number < 0) throw ExpressionError("a size, a stride or an offset is below 0");
  }
  const std::int64_t n_bytes = span_bytes(numbers, item_bytes);
  if (n_bytes != 0 && numbers.back() > static_cast<std::int64_t>(room_bytes) - n_bytes) {
    throw ExpressionError("a tensor reaches beyond its memory");
  }
  if (numbers.back() % item_bytes != 0) throw ExpressionError("a tensor begins in an element");
}

void check_rooms(const SizedProgram& sizes) {
  for (std::size_t value = 0; value < sizes.values_bytes.size(); ++value) {
    if (sizes.values_bytes[value] > sizes.places->rooms_bytes.at(value)) {
      throw ExpressionError("a value is larger than the room that it was given");
    }
  }
}

void check_numbers(const std::vector<std::int64_t>& numbers,
                   const std::vector<VaryingNumber>& varying, std::size_t n_axes) {
  if (numbers.size() != 2 * n_axes + 1) {
    throw std::invalid_argument("a view has other numbers than its tensor");
  }
  check_numbers(varying, n_axes);
}

void check_numbers(const std::vector<VaryingNumber>& varying, std::size_t n_axes) {
  for (const VaryingNumber& one : varying) {
    if (one.position > 2 * n_axes) throw std::invalid_argument("a view has no such number");
  }
}

void check_scalar(const c10::IValue& argument, const std::optional<std::size_t>& item) {
  const auto is_number = [](const c10::IValue& value) { return value.isInt() || value.isDouble(); };
  const auto is_wrapped = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  };
  const bool fits = item ? argument.isList() && *item < argument.toList().size() &&
                               is_number(argument.toList().get(*item))
                         : is_number(argument) || is_wrapped(argument);
  if (!fits) throw std::invalid_argument("a launch has no number where one is to vary");
}

}  // namespace offload
