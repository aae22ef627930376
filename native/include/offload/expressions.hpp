// Arithmetic over sizes, as postfix code. It computes the numbers of a program whose sizes vary,
// once the sizes are known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace offload {

// An operation pops its operands from the stack (the last operand is on top) and pushes its result.
// Integers are 64 bits wide, reals are doubles. Division rounds down and a remainder has the sign
// of its divisor, as in Python. Comparisons give the integer 1 or 0. In the order of
// kOperationNames.
enum class Operation : std::uint8_t {
  kInteger,  // the instruction's operand
  kReal,     // the instruction's operand
  kSize,     // of the dim at the position that the instruction's integer gives
  kAdd,
  kMultiply,
  kFloorDivide,
  kModulo,
  kPower,  // integer with a non-negative exponent, or reals
  kMinimum,
  kMaximum,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kAnd,
  kOr,
  kNot,
  kWhere,  // the second operand if the first is not 0, else the third
  kToReal,
  kTrueDivide,
  kSquareRoot,
  kLogarithm,
  kFloor,  // real to integer, like the next three
  kCeiling,
  kTruncate,
  kRound,  // half to even
  kExponential,
  kBinaryLogarithm,
  kSine,
  kCosine,
  kRoundDecimals,    // a real to as many decimals as the second operand says, ties to even
  kGreatestDivisor,  // common to two integers; 0 of zeros
  kLeastMultiple,    // common to two integers; 0 if one is 0
};

inline constexpr const char* kOperationNames[] = {
    "integer",
    "real",
    "size",
    "add",
    "multiply",
    "floor_divide",
    "modulo",
    "power",
    "minimum",
    "maximum",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "and",
    "or",
    "not",
    "where",
    "to_real",
    "true_divide",
    "square_root",
    "logarithm",
    "floor",
    "ceiling",
    "truncate",
    "round",
    "exponential",
    "binary_logarithm",
    "sine",
    "cosine",
    "round_decimals",
    "greatest_divisor",
    "least_multiple",
};
inline constexpr std::size_t kOperationCount = sizeof(kOperationNames) / sizeof(*kOperationNames);

struct Number {
  bool is_real = false;
  std::int64_t integer = 0;
  double real = 0.0;
};

struct Bounds {
  Number least;
  Number greatest;
};

struct Instruction {
  Operation operation = Operation::kInteger;
  Number operand;  // for kInteger, kReal and kSize
};

// No result exists for these sizes: 64-bit overflow, a division by 0, or NaN.
class ExpressionError : public std::domain_error {
 public:
  using std::domain_error::domain_error;
};

// Expressions over the same dims, each evaluated independently.
//
// Owner: its creator. Thread: any number at once; it is immutable.
class Expressions {
 public:
  // Throws ExpressionError if a code does not leave exactly one result, pops more operands than
  // exist, names a dim that does not exist, or applies an operation to an operand that it does not
  // take.
  Expressions(std::size_t n_dims, std::vector<std::vector<Instruction>> codes);

  std::size_t n_dims() const { return n_dims_; }
  std::size_t size() const { return ends_.size(); }

  // The result of one expression. `sizes` has n_dims elements. Throws ExpressionError.
  Number evaluate(std::size_t index, const std::int64_t* sizes) const;

  // Bounds of the result for all sizes from `least` to `greatest`, both included; they need not be
  // tight. Throws ExpressionError if some of these sizes may have no result, or nothing is known of
  // it.
  Bounds bounds(std::size_t index, const std::int64_t* least, const std::int64_t* greatest) const;

  // An upper bound of all results that exist for sizes from `least` to `greatest`: exact if there
  // are few sizes, else that of `bounds`. Throws ExpressionError as bounds does, and if none of the
  // few sizes has a result.
  Number greatest(std::size_t index, const std::int64_t* least, const std::int64_t* greatest) const;

 private:
  // Runs the code of one expression over operands of any kind.
  template <typename Operand, typename Apply>
  Operand run(std::size_t index, Apply apply) const;

  std::size_t begin_of(std::size_t index) const { return index == 0 ? 0 : ends_[index - 1]; }
  std::vector<std::size_t> dims_of(std::size_t index) const;

  std::size_t n_dims_;
  std::vector<Instruction> code_;  // of all expressions, concatenated
  std::vector<std::size_t> ends_;
};

}  // namespace offload
