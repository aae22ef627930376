// Arithmetic over sizes: what is computed, and that no code reaches beyond its stack.
#include "offload/expressions.hpp"

#include <cstdint>
#include <vector>

#include "check.hpp"

using offload::ExpressionError;
using offload::Expressions;
using offload::Instruction;
using offload::Operation;

namespace {

Instruction integer(std::int64_t value) { return {Operation::kInteger, {false, value, 0.0}}; }
Instruction size(std::int64_t dim) { return {Operation::kSize, {false, dim, 0.0}}; }
Instruction of(Operation operation) { return {operation, {}}; }

std::int64_t evaluated(const std::vector<Instruction>& code, std::int64_t n) {
  return Expressions(1, {code}).evaluate(0, &n).integer;
}

bool is_refused(const std::vector<Instruction>& code, std::int64_t n = 7) {
  try {
    evaluated(code, n);
  } catch (const ExpressionError&) {
    return true;
  }
  return false;
}

void test_division_rounds_down() {
  const std::vector<Instruction> quotient{size(0), integer(3), of(Operation::kFloorDivide)};
  const std::vector<Instruction> remainder{size(0), integer(3), of(Operation::kModulo)};
  CHECK_THAT(evaluated(quotient, 7) == 2);
  CHECK_THAT(evaluated(quotient, -7) == -3);
  CHECK_THAT(evaluated(remainder, -7) == 2);
}

void test_each_expression_is_evaluated_alone() {
  const Expressions both(2, {{size(0), size(1), of(Operation::kMultiply)}, {size(1)}});
  const std::vector<std::int64_t> sizes{6, 9};
  CHECK_THAT(both.size() == 2);
  CHECK_THAT(both.evaluate(0, sizes.data()).integer == 54);
  CHECK_THAT(both.evaluate(1, sizes.data()).integer == 9);
}

void test_the_stack_has_a_bound() {
  std::vector<Instruction> code(64, size(0));
  code.insert(code.end(), 63, of(Operation::kAdd));
  CHECK_THAT(evaluated(code, 2) == 128);
  std::vector<Instruction> deeper(65, size(0));
  deeper.insert(deeper.end(), 64, of(Operation::kAdd));
  CHECK_THAT(is_refused(deeper));
}

void test_what_leaves_64_bits_is_refused() {
  const std::int64_t greatest = INT64_MAX;
  CHECK_THAT(is_refused({size(0), integer(1), of(Operation::kAdd)}, greatest));
  CHECK_THAT(is_refused({size(0), integer(2), of(Operation::kMultiply)}, greatest));
  CHECK_THAT(is_refused({size(0), integer(-1), of(Operation::kFloorDivide)}, INT64_MIN));
  CHECK_THAT(is_refused({size(0), integer(64), of(Operation::kPower)}, 2));
  CHECK_THAT(is_refused({size(0), of(Operation::kToReal)}, greatest));
}

void test_code_that_is_none_is_refused() {
  CHECK_THAT(is_refused({}));
  CHECK_THAT(is_refused({of(Operation::kAdd)}));
  CHECK_THAT(is_refused({size(0), of(Operation::kWhere)}));
  CHECK_THAT(is_refused({size(1)}));
  CHECK_THAT(is_refused({size(-1)}));
  CHECK_THAT(is_refused({of(static_cast<Operation>(200))}));
}

}  // namespace

int main() {
  test_division_rounds_down();
  test_each_expression_is_evaluated_alone();
  test_the_stack_has_a_bound();
  test_what_leaves_64_bits_is_refused();
  test_code_that_is_none_is_refused();
  return offload::test::result();
}
