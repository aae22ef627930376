// What residents with varying sizes share: numbers of tensors, and of other arguments of launches.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/sizes.hpp"
#include "run/call.hpp"

namespace offload {

// The numbers of a tensor are its sizes, its strides, and its offset in bytes.

// Sets the numbers that vary.
void set_numbers(std::vector<std::int64_t>& numbers, const std::vector<VaryingNumber>& varying,
                 const SizedProgram& sizes);

// The same for a layout, and the offset in bytes beside it.
void set_layout(TensorLayout& layout, std::int64_t& offset_bytes,
                const std::vector<VaryingNumber>& varying, const SizedProgram& sizes);

// Whether a tensor of these numbers has no elements.
bool is_empty(const std::vector<std::int64_t>& numbers);

// Throws ExpressionError for negative numbers, and for a tensor that begins inside an element or
// reaches beyond its memory.
void check_reach(const std::vector<std::int64_t>& numbers, std::int64_t item_bytes,
                 std::size_t room_bytes);

// Throws ExpressionError for a Value that is larger than its room.
void check_rooms(const SizedProgram& sizes);

// Throws std::invalid_argument for positions that a tensor of `n_axes` axes does not have; the
// first overload also for a wrong number of numbers.
void check_numbers(const std::vector<std::int64_t>& numbers,
                   const std::vector<VaryingNumber>& varying, std::size_t n_axes);
void check_numbers(const std::vector<VaryingNumber>& varying, std::size_t n_axes);

// Throws std::invalid_argument if an argument, or its item, is not a number.
void check_scalar(const c10::IValue& argument, const std::optional<std::size_t>& item);

}  // namespace offload
