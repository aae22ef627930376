#include "offload/expressions.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "plan/size_numbers.hpp"

namespace offload {
namespace {

using namespace numbers;

// Deeper than the stack of any size that a model computes. An evaluation needs only its stack.
constexpr std::size_t kMostOperands = 64;

// Up to this number all sizes are evaluated one by one, which takes some 50 us.
constexpr std::int64_t kMostPoints = 1024;

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

// All operations but `not`, sine and cosine increase with their operand.
Bounds bounds_of_one(Operation operation, const Bounds& given) {
  if (operation == Operation::kNot) return truth(may_be_true(given), may_be_false(given));
  const bool is_wave = operation == Operation::kSine || operation == Operation::kCosine;
  if (is_wave && !is_one_number(given)) return {{true, 0, -1.0}, {true, 0, 1.0}};
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
  if (compare(base.least, integer(1)) < 0) refuse("the range of a power of this base is not known");
  return over({power(base.least, exponent.least), power(base.least, exponent.greatest),
               power(base.greatest, exponent.least), power(base.greatest, exponent.greatest)});
}

// Of a common divisor or multiple.
Bounds bounds_of_common(Operation operation, const Bounds& left, const Bounds& right) {
  if (is_one_number(left) && is_one_number(right)) {
    const Number only = of_two(operation, left.least, right.least);
    return {only, only};
  }
  const std::int64_t one = as_integer(left.least), other = as_integer(right.least);
  if (one < 0 || other < 0) refuse("nothing is known of a divisor of numbers below 0");
  if (operation == Operation::kLeastMultiple) {
    return {integer(one > 0 && other > 0), multiply(left.greatest, right.greatest)};
  }
  // The divisor of a number and 0 is the number.
  return {integer(one > 0 || other > 0),
          of_two(Operation::kMaximum, left.greatest, right.greatest)};
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
    case Operation::kGreatestDivisor:
    case Operation::kLeastMultiple:
      return bounds_of_common(operation, left, right);
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
      return corners();  // sums, products, minima, maxima, and roundings to a number of decimals
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
