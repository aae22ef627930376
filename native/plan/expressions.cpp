#include "offload/expressions.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

namespace offload {
namespace {

// Deeper than any size that a model computes; what is on the stack is all that an evaluation needs.
constexpr std::size_t kMostOperands = 64;

// Up to here every integer is a double.
constexpr std::int64_t kMostExact = std::int64_t{1} << 53;

Number integer(std::int64_t value) { return {false, value, 0.0}; }
Number real(double value) { return {true, 0, value}; }

[[noreturn]] void refuse(const char* why) { throw ExpressionError(why); }

double as_real(const Number& number) {
  if (number.is_real) return number.real;
  if (number.integer > kMostExact || number.integer < -kMostExact) {
    refuse("an integer beyond 2^53 is made a fraction");
  }
  return static_cast<double>(number.integer);
}

std::int64_t as_integer(const Number& number) {
  if (number.is_real) refuse("a fraction stands where an integer is expected");
  return number.integer;
}

bool as_truth(const Number& number) {
  return number.is_real ? number.real != 0 : number.integer != 0;
}

Number checked(double value) {
  if (std::isnan(value)) refuse("the result is no number");
  return real(value);
}

Number add(const Number& left, const Number& right) {
  if (left.is_real || right.is_real) return checked(as_real(left) + as_real(right));
  std::int64_t sum = 0;
  if (__builtin_add_overflow(left.integer, right.integer, &sum)) refuse("a sum leaves 64 bits");
  return integer(sum);
}

Number multiply(const Number& left, const Number& right) {
  if (left.is_real || right.is_real) return checked(as_real(left) * as_real(right));
  std::int64_t product = 0;
  if (__builtin_mul_overflow(left.integer, right.integer, &product)) {
    refuse("a product leaves 64 bits");
  }
  return integer(product);
}

// Rounded down, with its remainder.
std::pair<std::int64_t, std::int64_t> divide(std::int64_t dividend, std::int64_t divisor) {
  if (divisor == 0) refuse("a size is divided by 0");
  if (divisor == -1) {
    if (dividend == std::numeric_limits<std::int64_t>::min()) refuse("a quotient leaves 64 bits");
    return {-dividend, 0};
  }
  std::int64_t quotient = dividend / divisor, remainder = dividend % divisor;
  if (remainder != 0 && (remainder < 0) != (divisor < 0)) {
    --quotient;
    remainder += divisor;
  }
  return {quotient, remainder};
}

Number power(const Number& base, const Number& exponent) {
  if (base.is_real || exponent.is_real) {
    const double value = std::pow(as_real(base), as_real(exponent));
    // Python raises where it divides by 0, or the result is too large.
    if (std::isinf(value)) refuse("a power has no finite result");
    return checked(value);
  }
  if (exponent.integer < 0) refuse("an integer is raised to a power below 0");
  Number result = integer(1), square = base;
  for (std::int64_t left = exponent.integer; left > 0; left /= 2) {
    if (left % 2 == 1) result = multiply(result, square);
    if (left > 1) square = multiply(square, square);
  }
  return result;
}

int compare(const Number& left, const Number& right) {
  if (left.is_real || right.is_real) {
    const double one = as_real(left), other = as_real(right);
    return one < other ? -1 : (one > other ? 1 : 0);
  }
  return left.integer < right.integer ? -1 : (left.integer > right.integer ? 1 : 0);
}

Number rounded(const Number& number, Operation operation) {
  if (!number.is_real) return number;
  double value = number.real;
  if (operation == Operation::kFloor) value = std::floor(value);
  if (operation == Operation::kCeiling) value = std::ceil(value);
  if (operation == Operation::kTruncate) value = std::trunc(value);
  if (operation == Operation::kRound) value = std::nearbyint(value);
  if (!(std::abs(value) < 9.2e18)) refuse("a rounded fraction leaves 64 bits");
  return integer(static_cast<std::int64_t>(value));
}

Number root(double value) {
  if (value < 0) refuse("the square root of a number below 0");
  return real(std::sqrt(value));
}

Number logarithm(double value) {
  if (value <= 0) refuse("the logarithm of a number that is not above 0");
  return real(std::log(value));
}

Number quotient(const Number& left, const Number& right) {
  if (as_real(right) == 0) refuse("a size is divided by 0");
  return checked(as_real(left) / as_real(right));
}

std::size_t operands_of(Operation operation) {
  switch (operation) {
    case Operation::kInteger:
    case Operation::kReal:
    case Operation::kSize:
      return 0;
    case Operation::kNot:
    case Operation::kToReal:
    case Operation::kSquareRoot:
    case Operation::kLogarithm:
    case Operation::kFloor:
    case Operation::kCeiling:
    case Operation::kTruncate:
    case Operation::kRound:
      return 1;
    case Operation::kWhere:
      return 3;
    default:
      return 2;
  }
}

Number of_one(Operation operation, const Number& given) {
  switch (operation) {
    case Operation::kNot:
      return integer(as_truth(given) ? 0 : 1);
    case Operation::kToReal:
      return real(as_real(given));
    case Operation::kSquareRoot:
      return root(as_real(given));
    case Operation::kLogarithm:
      return logarithm(as_real(given));
    default:
      return rounded(given, operation);
  }
}

Number of_two(Operation operation, const Number& left, const Number& right) {
  switch (operation) {
    case Operation::kAdd:
      return add(left, right);
    case Operation::kMultiply:
      return multiply(left, right);
    case Operation::kFloorDivide:
      return integer(divide(as_integer(left), as_integer(right)).first);
    case Operation::kModulo:
      return integer(divide(as_integer(left), as_integer(right)).second);
    case Operation::kPower:
      return power(left, right);
    case Operation::kMinimum:
      return compare(left, right) <= 0 ? left : right;
    case Operation::kMaximum:
      return compare(left, right) >= 0 ? left : right;
    case Operation::kEqual:
      return integer(compare(left, right) == 0);
    case Operation::kNotEqual:
      return integer(compare(left, right) != 0);
    case Operation::kLess:
      return integer(compare(left, right) < 0);
    case Operation::kLessEqual:
      return integer(compare(left, right) <= 0);
    case Operation::kAnd:
      return integer(as_truth(left) && as_truth(right));
    case Operation::kOr:
      return integer(as_truth(left) || as_truth(right));
    default:
      return quotient(left, right);
  }
}

void check(const std::vector<Instruction>& code, std::size_t n_dims) {
  std::size_t depth = 0;
  for (const Instruction& instruction : code) {
    if (static_cast<std::size_t>(instruction.operation) >= kOperationCount) {
      refuse("an expression has an unknown operation");
    }
    if (instruction.operation == Operation::kSize &&
        (instruction.operand.integer < 0 ||
         static_cast<std::size_t>(instruction.operand.integer) >= n_dims)) {
      refuse("an expression names a dim that does not exist");
    }
    const std::size_t taken = operands_of(instruction.operation);
    if (taken > depth) refuse("an expression takes more operands than it has");
    depth += 1 - taken;
    if (depth > kMostOperands) refuse("an expression is nested too deeply");
  }
  if (depth != 1) refuse("an expression has no result, or more than one");
}

}  // namespace

Expressions::Expressions(std::size_t n_dims, std::vector<std::vector<Instruction>> codes)
    : n_dims_(n_dims) {
  for (const std::vector<Instruction>& code : codes) {
    check(code, n_dims);
    code_.insert(code_.end(), code.begin(), code.end());
    ends_.push_back(code_.size());
  }
}

Number Expressions::evaluate(std::size_t index, const std::int64_t* sizes) const {
  std::array<Number, kMostOperands> stack;
  std::size_t depth = 0;
  for (std::size_t at = index == 0 ? 0 : ends_[index - 1]; at < ends_[index]; ++at) {
    const auto& [operation, operand] = code_[at];
    const std::size_t taken = operands_of(operation);
    depth -= taken;
    Number& top = stack[depth];
    if (taken == 0) {
      top = operation == Operation::kSize ? integer(sizes[operand.integer]) : operand;
    } else if (taken == 1) {
      top = of_one(operation, top);
    } else if (taken == 2) {
      top = of_two(operation, top, stack[depth + 1]);
    } else {
      top = as_truth(top) ? stack[depth + 1] : stack[depth + 2];
    }
    ++depth;
  }
  return stack[0];
}

}  // namespace offload
