#include "plan/size_numbers.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>

namespace offload::numbers {
namespace {

// Up to here a double represents every integer.
constexpr std::int64_t kMostExact = std::int64_t{1} << 53;

// More decimals than models ask for.
constexpr std::int64_t kMostDecimals = 100;

// A sign, at most 309 digits of a double before its point, the point, the decimals, and a final 0.
constexpr std::size_t kMostCharacters = 1 + 309 + 1 + kMostDecimals + 1;

Number real(double value) { return {true, 0, value}; }

double as_real(const Number& number) {
  if (number.is_real) return number.real;
  if (number.integer > kMostExact || number.integer < -kMostExact) {
    refuse("an integer beyond 2^53 is converted to a fraction");
  }
  return static_cast<double>(number.integer);
}

Number checked(double value) {
  if (std::isnan(value)) refuse("the result is not a number");
  return real(value);
}

Number rounded(const Number& number, Operation operation) {
  if (!number.is_real) return number;
  double value = number.real;
  if (operation == Operation::kFloor) value = std::floor(value);
  if (operation == Operation::kCeiling) value = std::ceil(value);
  if (operation == Operation::kTruncate) value = std::trunc(value);
  if (operation == Operation::kRound) value = std::nearbyint(value);
  if (!(std::abs(value) < 9.2e18)) refuse("a rounded fraction overflows 64 bits");
  return integer(static_cast<std::int64_t>(value));
}

Number root(double value) {
  if (value < 0) refuse("the square root of a number below 0");
  return real(std::sqrt(value));
}

double above_zero(double value) {
  if (value <= 0) refuse("the logarithm of a number that is not above 0");
  return value;
}

// Python raises where the result is too large.
Number exponential(double value) {
  const double result = std::exp(value);
  if (std::isinf(result)) refuse("an exponential has no finite result");
  return checked(result);
}

// As float.__round__ (Objects/floatobject.c, double_round): the decimal digits of the exact value,
// ties to even, and the double nearest to them. glibc's printf writes the same digits.
Number rounded_to_decimals(double value, std::int64_t n_decimals) {
  if (n_decimals < 0 || n_decimals > kMostDecimals) refuse("a number of decimals is out of range");
  if (!std::isfinite(value)) refuse("a number that is not finite is rounded");
  std::array<char, kMostCharacters> digits;
  std::snprintf(digits.data(), digits.size(), "%.*f", static_cast<int>(n_decimals), value);
  return checked(std::strtod(digits.data(), nullptr));
}

std::int64_t magnitude(std::int64_t value) {
  if (value == std::numeric_limits<std::int64_t>::min()) refuse("a divisor overflows 64 bits");
  return value < 0 ? -value : value;
}

Number greatest_divisor(std::int64_t one, std::int64_t other) {
  return integer(std::gcd(magnitude(one), magnitude(other)));
}

Number least_multiple(std::int64_t one, std::int64_t other) {
  if (one == 0 || other == 0) return integer(0);
  const std::int64_t divisor = greatest_divisor(one, other).integer;
  return multiply(integer(magnitude(one) / divisor), integer(magnitude(other)));
}

Number quotient(const Number& left, const Number& right) {
  if (as_real(right) == 0) refuse("a size is divided by 0");
  return checked(as_real(left) / as_real(right));
}

}  // namespace

[[noreturn]] void refuse(const char* why) { throw ExpressionError(why); }

Number integer(std::int64_t value) { return {false, value, 0.0}; }

std::int64_t as_integer(const Number& number) {
  if (number.is_real) refuse("a fraction stands where an integer is expected");
  return number.integer;
}

bool as_truth(const Number& number) {
  return number.is_real ? number.real != 0 : number.integer != 0;
}

Number add(const Number& left, const Number& right) {
  if (left.is_real || right.is_real) return checked(as_real(left) + as_real(right));
  std::int64_t sum = 0;
  if (__builtin_add_overflow(left.integer, right.integer, &sum)) refuse("a sum overflows 64 bits");
  return integer(sum);
}

Number multiply(const Number& left, const Number& right) {
  if (left.is_real || right.is_real) return checked(as_real(left) * as_real(right));
  std::int64_t product = 0;
  if (__builtin_mul_overflow(left.integer, right.integer, &product)) {
    refuse("a product overflows 64 bits");
  }
  return integer(product);
}

std::pair<std::int64_t, std::int64_t> divide(std::int64_t dividend, std::int64_t divisor) {
  if (divisor == 0) refuse("a size is divided by 0");
  if (divisor == -1) {
    if (dividend == std::numeric_limits<std::int64_t>::min())
      refuse("a quotient overflows 64 bits");
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
    case Operation::kExponential:
    case Operation::kBinaryLogarithm:
    case Operation::kSine:
    case Operation::kCosine:
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
      return real(std::log(above_zero(as_real(given))));
    case Operation::kExponential:
      return exponential(as_real(given));
    case Operation::kBinaryLogarithm:
      return real(std::log2(above_zero(as_real(given))));
    case Operation::kSine:
      return checked(std::sin(as_real(given)));
    case Operation::kCosine:
      return checked(std::cos(as_real(given)));
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
    case Operation::kRoundDecimals:
      return rounded_to_decimals(as_real(left), as_integer(right));
    case Operation::kGreatestDivisor:
      return greatest_divisor(as_integer(left), as_integer(right));
    case Operation::kLeastMultiple:
      return least_multiple(as_integer(left), as_integer(right));
    default:
      return quotient(left, right);
  }
}

}  // namespace offload::numbers
