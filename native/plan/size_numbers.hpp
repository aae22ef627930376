// Arithmetic of Numbers, as Python computes it. Private to expressions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "offload/expressions.hpp"

namespace offload::numbers {

// All functions throw ExpressionError where there is no result: 64-bit overflow, a division by 0, a
// real without a finite result where Python raises, or NaN. Thread: any number at once.

[[noreturn]] void refuse(const char* why);

Number integer(std::int64_t value);

// Refuses a real.
std::int64_t as_integer(const Number& number);

bool as_truth(const Number& number);

Number add(const Number& left, const Number& right);
Number multiply(const Number& left, const Number& right);

// The quotient, rounded down, and its remainder.
std::pair<std::int64_t, std::int64_t> divide(std::int64_t dividend, std::int64_t divisor);

Number power(const Number& base, const Number& exponent);

// Below 0, 0 or above 0, as `left` is less, equal or greater.
int compare(const Number& left, const Number& right);

// The number of operands that an operation pops.
std::size_t operands_of(Operation operation);

// The result of an operation with one operand.
Number of_one(Operation operation, const Number& given);

// The result of an operation with two operands.
Number of_two(Operation operation, const Number& left, const Number& right);

}  // namespace offload::numbers
