// Arithmetic over sizes: its results, and that no code reaches beyond its stack.
#include "offload/expressions.hpp"

#include <cstdint>
#include <vector>

#include "check.hpp"

using offload::ExpressionError;
using offload::Expressions;
using offload::Instruction;
using offload::Operation;

namespace {

using offload::test::throws;
Instruction integer(std::int64_t value) { return {Operation::kInteger, {false, value, 0.0}}; }
Instruction size(std::int64_t dim) { return {Operation::kSize, {false, dim, 0.0}}; }
Instruction of(Operation operation) { return {operation, {}}; }

std::int64_t evaluated(const std::vector<Instruction>& code, std::int64_t n) {
  return Expressions(1, {code}).evaluate(0, &n).integer;
}

bool is_refused(const std::vector<Instruction>& code, std::int64_t n = 7) {
  return throws<ExpressionError>([&] { evaluated(code, n); });
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

void test_bounds_hold_for_all_between() {
  const std::vector<std::vector<Instruction>> codes{
      {size(0), size(1), of(Operation::kMultiply), integer(-3), of(Operation::kAdd)},
      {size(0), integer(-1), of(Operation::kMultiply), integer(5), of(Operation::kModulo)},
      {size(0), size(1), integer(1), of(Operation::kAdd), of(Operation::kFloorDivide)},
      {size(0), size(1), of(Operation::kLess), size(0), size(1), of(Operation::kWhere)},
      {size(0), size(1), of(Operation::kMaximum), integer(4), of(Operation::kMinimum)}};
  const Expressions all(2, codes);
  const std::vector<std::int64_t> least{0, 2}, greatest{9, 7};
  for (std::size_t index = 0; index < codes.size(); ++index) {
    const auto bounds = all.bounds(index, least.data(), greatest.data());
    std::int64_t most = INT64_MIN;
    for (std::int64_t n = least[0]; n <= greatest[0]; ++n) {
      for (std::int64_t m = least[1]; m <= greatest[1]; ++m) {
        const std::vector<std::int64_t> sizes{n, m};
        const std::int64_t found = all.evaluate(index, sizes.data()).integer;
        CHECK_THAT(bounds.least.integer <= found && found <= bounds.greatest.integer);
        most = found > most ? found : most;
      }
    }
    CHECK_THAT(all.greatest(index, least.data(), greatest.data()).integer == most);
  }
}

void test_bounds_beyond_64_bits_are_refused() {
  const Expressions square(1, {{size(0), size(0), of(Operation::kMultiply)}});
  const std::int64_t least = 0, greatest = INT64_MAX;
  for (const bool of_one : {true, false}) {
    bool is_refused = false;
    try {
      if (of_one) {
        square.bounds(0, &least, &greatest);
      } else {
        square.greatest(0, &least, &greatest);
      }
    } catch (const ExpressionError&) {
      is_refused = true;
    }
    CHECK_THAT(is_refused);
  }
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
  test_bounds_hold_for_all_between();
  test_bounds_beyond_64_bits_are_refused();
  test_code_that_is_none_is_refused();
  return offload::test::result();
}
