// Arithmetic over sizes, as postfix code: what the numbers of a program whose sizes vary are
// computed by, when the sizes are known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace offload {

// An operation takes its operands from the stack, the last one on top, and puts its result there.
// Integers are 64 bits wide and reals are doubles; division rounds down and a remainder has the
// sign of its divisor, as Python's do. What compares gives the integer 1 or 0. The order is that of
// kOperationNames.
enum class Operation : std::uint8_t {
  kInteger,  // of the instruction
  kReal,     // of the instruction
  kSize,     // of the dim whose position the instruction's integer is
  kAdd,
  kMultiply,
  kFloorDivide,
  kModulo,
  kPower,  // of an integer, to one that is not negative; of reals
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
  kFloor,  // of a real, as an integer; so are the next three
  kCeiling,
  kTruncate,
  kRound,  // half to even
};

inline constexpr const char* kOperationNames[] = {
    "integer",   "real",    "size",    "add",      "multiply",  "floor_divide", "modulo",
    "power",     "minimum", "maximum", "equal",    "not_equal", "less",         "less_equal",
    "and",       "or",      "not",     "where",    "to_real",   "true_divide",  "square_root",
    "logarithm", "floor",   "ceiling", "truncate", "round",
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
  Number operand;  // of kInteger, kReal and kSize
};

// These sizes have no result: a number leaves 64 bits, is divided by 0, or is no number.
class ExpressionError : public std::domain_error {
 public:
  using std::domain_error::domain_error;
};

// Expressions over the same dims, each of which is evaluated alone.
//
// Owner: whoever makes it. Thread: any number at once; it does not change.
class Expressions {
 public:
  // Throws ExpressionError where one leaves no result or more than one, takes more operands than
  // there are, names a dim that does not exist or an operation that takes no such operand.
  Expressions(std::size_t n_dims, std::vector<std::vector<Instruction>> codes);

  std::size_t n_dims() const { return n_dims_; }
  std::size_t size() const { return ends_.size(); }

  // The result of one of them. `sizes` has n_dims of them. Throws ExpressionError.
  Number evaluate(std::size_t index, const std::int64_t* sizes) const;

  // Between which numbers the result lies for all sizes from `least` to `greatest`, both included;
  // the bounds need not be reached. Throws ExpressionError where one of these sizes may have no
  // result, or nothing is known of it.
  Bounds bounds(std::size_t index, const std::int64_t* least, const std::int64_t* greatest) const;

  // A number that no result exceeds for all sizes from `least` to `greatest` that have one: of a
  // few sizes the greatest result, of many the bound. Throws ExpressionError as bounds does, and
  // where none of the few has a result.
  Number greatest(std::size_t index, const std::int64_t* least, const std::int64_t* greatest) const;

 private:
  // Runs the code of one of them over operands of any kind.
  template <typename Operand, typename Apply>
  Operand run(std::size_t index, Apply apply) const;

  std::size_t begin_of(std::size_t index) const { return index == 0 ? 0 : ends_[index - 1]; }
  std::vector<std::size_t> dims_of(std::size_t index) const;

  std::size_t n_dims_;
  std::vector<Instruction> code_;  // of all, one behind the other
  std::vector<std::size_t> ends_;
};

}  // namespace offload
