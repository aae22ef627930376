#include "offload/expressions.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace offload {
namespace {

// Deeper than the stack of any size that a model computes. An evaluation needs only its stack.
constexpr std::size_t kMostOperands = 64;

// Up to this number all sizes are evaluated one by one, which takes some 50 us.
constexpr std::int64_t kMostPoints = 1024;

// Up to here a double represents every integer.
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

// The quotient, rounded down, and its remainder.
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

// ---- bounds -------------------------------------------------------------------------------------

bool is_one_number(const Bounds& bounds) { return compare(bounds.least, bounds.greatest) == 0; }

Bounds over(std::initializer_list<Number> corners) {
  Bounds found{*corners.begin(), *corners.begin()};
  for (const Number& corner : corners) {
    if (compare(corner, found.least) < 0) found.least = corner;
    if (compare(corner, found.greatest) > 0) found.greatest = corner;
  }
  return found;
}

Bounds truth(bool may_be_false, bool may_be_true) {
  return {integer(may_be_false ? 0 : 1), integer(may_be_true ? 1 : 0)};
}

bool may_be_true(const Bounds& bounds) {
  return as_truth(bounds.least) || as_truth(bounds.greatest) || !is_one_number(bounds);
}

bool may_be_false(const Bounds& bounds) {
  return compare(bounds.least, integer(0)) <= 0 && compare(bounds.greatest, integer(0)) >= 0;
}

// All operations but `not` increase with their operand.
Bounds bounds_of_one(Operation operation, const Bounds& given) {
  if (operation == Operation::kNot) return truth(may_be_true(given), may_be_false(given));
  return {of_one(operation, given.least), of_one(operation, given.greatest)};
}

// The divisor of a quotient or remainder must have one sign.
void check_divisor(const Bounds& divisor) {
  if (may_be_false(divisor)) refuse("a size may be divided by 0");
}

Bounds bounds_of_remainder(const Bounds& left, const Bounds& right) {
  check_divisor(right);
  if (is_one_number(left) && is_one_number(right)) {
    const Number only = of_two(Operation::kModulo, left.least, right.least);
    return {only, only};
  }
  if (compare(right.least, integer(0)) < 0) return {add(right.least, integer(1)), integer(0)};
  // Within one multiple of the divisor the remainder increases with the dividend.
  if (is_one_number(right) &&
      divide(as_integer(left.least), as_integer(right.least)).first ==
          divide(as_integer(left.greatest), as_integer(right.least)).first) {
    return {of_two(Operation::kModulo, left.least, right.least),
            of_two(Operation::kModulo, left.greatest, right.least)};
  }
  return {integer(0), add(right.greatest, integer(-1))};
}

Bounds bounds_of_power(const Bounds& base, const Bounds& exponent) {
  if (is_one_number(base) && is_one_number(exponent)) {
    const Number only = power(base.least, exponent.least);
    return {only, only};
  }
  if (compare(base.least, integer(1)) < 0) refuse("nothing is known of a power of this base");
  return over({power(base.least, exponent.least), power(base.least, exponent.greatest),
               power(base.greatest, exponent.least), power(base.greatest, exponent.greatest)});
}

Bounds bounds_of_comparison(Operation operation, const Bounds& left, const Bounds& right) {
  const bool may_be_less = compare(left.least, right.greatest) < 0;
  const bool may_be_greater = compare(left.greatest, right.least) > 0;
  const bool may_be_equal =
      compare(left.least, right.greatest) <= 0 && compare(left.greatest, right.least) >= 0;
  switch (operation) {
    case Operation::kEqual:
      return truth(may_be_less || may_be_greater, may_be_equal);
    case Operation::kNotEqual:
      return truth(may_be_equal, may_be_less || may_be_greater);
    case Operation::kLess:
      return truth(may_be_equal || may_be_greater, may_be_less);
    default:
      return truth(may_be_greater, may_be_less || may_be_equal);
  }
}

Bounds bounds_of_two(Operation operation, const Bounds& left, const Bounds& right) {
  const auto corners = [&] {
    return over({of_two(operation, left.least, right.least),
                 of_two(operation, left.least, right.greatest),
                 of_two(operation, left.greatest, right.least),
                 of_two(operation, left.greatest, right.greatest)});
  };
  switch (operation) {
    case Operation::kFloorDivide:
    case Operation::kTrueDivide:
      check_divisor(right);
      return corners();
    case Operation::kModulo:
      return bounds_of_remainder(left, right);
    case Operation::kPower:
      return bounds_of_power(left, right);
    case Operation::kEqual:
    case Operation::kNotEqual:
    case Operation::kLess:
    case Operation::kLessEqual:
      return bounds_of_comparison(operation, left, right);
    case Operation::kAnd:
      return truth(may_be_false(left) || may_be_false(right),
                   may_be_true(left) && may_be_true(right));
    case Operation::kOr:
      return truth(may_be_false(left) && may_be_false(right),
                   may_be_true(left) || may_be_true(right));
    default:
      return corners();  // sums, products, minima and maxima
  }
}

Bounds bounds_of_choice(const Bounds& condition, const Bounds& one, const Bounds& other) {
  if (!may_be_false(condition)) return one;
  if (!may_be_true(condition)) return other;
  return over({one.least, one.greatest, other.least, other.greatest});
}

// The number of sizes, at most kMostPoints + 1.
std::int64_t sizes_between(std::int64_t least, std::int64_t greatest) {
  if (greatest < least) return 0;
  const auto n_beyond = static_cast<std::uint64_t>(greatest) - static_cast<std::uint64_t>(least);
  return static_cast<std::int64_t>(std::min<std::uint64_t>(n_beyond, kMostPoints)) + 1;
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

template <typename Operand, typename Apply>
Operand Expressions::run(std::size_t index, Apply apply) const {
  std::array<Operand, kMostOperands> stack;
  std::size_t depth = 0;
  for (std::size_t at = begin_of(index); at < ends_[index]; ++at) {
    depth -= operands_of(code_[at].operation);
    stack[depth] = apply(code_[at], &stack[depth]);
    ++depth;
  }
  return stack[0];
}

Number Expressions::evaluate(std::size_t index, const std::int64_t* sizes) const {
  return run<Number>(index, [sizes](const Instruction& instruction, const Number* operands) {
    const auto& [operation, operand] = instruction;
    switch (operands_of(operation)) {
      case 0:
        return operation == Operation::kSize ? integer(sizes[operand.integer]) : operand;
      case 1:
        return of_one(operation, operands[0]);
      case 2:
        return of_two(operation, operands[0], operands[1]);
      default:
        return as_truth(operands[0]) ? operands[1] : operands[2];
    }
  });
}

Bounds Expressions::bounds(std::size_t index, const std::int64_t* least,
                           const std::int64_t* greatest) const {
  return run<Bounds>(index, [=](const Instruction& instruction, const Bounds* operands) {
    const auto& [operation, operand] = instruction;
    switch (operands_of(operation)) {
      case 0:
        return operation == Operation::kSize
                   ? Bounds{integer(least[operand.integer]), integer(greatest[operand.integer])}
                   : Bounds{operand, operand};
      case 1:
        return bounds_of_one(operation, operands[0]);
      case 2:
        return bounds_of_two(operation, operands[0], operands[1]);
      default:
        return bounds_of_choice(operands[0], operands[1], operands[2]);
    }
  });
}

std::vector<std::size_t> Expressions::dims_of(std::size_t index) const {
  std::vector<std::size_t> dims;
  for (std::size_t at = begin_of(index); at < ends_[index]; ++at) {
    const auto dim = static_cast<std::size_t>(code_[at].operand.integer);
    const bool is_size = code_[at].operation == Operation::kSize;
    if (is_size && std::find(dims.begin(), dims.end(), dim) == dims.end()) dims.push_back(dim);
  }
  return dims;
}

Number Expressions::greatest(std::size_t index, const std::int64_t* least,
                             const std::int64_t* greatest) const {
  const std::vector<std::size_t> dims = dims_of(index);
  std::int64_t n_points = 1;
  for (const std::size_t dim : dims) {
    const std::int64_t n_sizes = sizes_between(least[dim], greatest[dim]);
    n_points *= n_sizes;  // at most kMostPoints + 1 each
    if (n_points > kMostPoints) return bounds(index, least, greatest).greatest;
  }
  std::vector<std::int64_t> sizes(least, least + n_dims_);
  std::optional<Number> found;
  for (std::int64_t point = 0; point < n_points; ++point) {
    std::int64_t rest = point;
    for (const std::size_t dim : dims) {
      const std::int64_t n_sizes = sizes_between(least[dim], greatest[dim]);
      sizes[dim] = least[dim] + rest % n_sizes;
      rest /= n_sizes;
    }
    try {
      const Number number = evaluate(index, sizes.data());
      if (!found || compare(number, *found) > 0) found = number;
    } catch (const ExpressionError&) {  // these sizes have no result and are never executed
    }
  }
  if (!found) refuse("no size has a result");
  return *found;
}

}  // namespace offload
