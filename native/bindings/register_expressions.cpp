#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "offload/expressions.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Integers come first, so that no Python integer becomes a fraction.
using Operand = std::variant<std::int64_t, double>;
using Code = std::vector<std::pair<std::string, Operand>>;

Instruction to_instruction(const std::string& name, const Operand& operand) {
  for (std::size_t index = 0; index < kOperationCount; ++index) {
    if (name != kOperationNames[index]) continue;
    Instruction instruction{static_cast<Operation>(index), {}};
    if (const auto* const integer = std::get_if<std::int64_t>(&operand)) {
      instruction.operand.integer = *integer;
    } else {
      instruction.operand = {true, 0, std::get<double>(operand)};
    }
    if (instruction.operand.is_real != (instruction.operation == Operation::kReal)) {
      throw ExpressionError("an operation has an operand of another kind: " + name);
    }
    return instruction;
  }
  throw ExpressionError("an expression has an unknown operation: " + name);
}

Expressions make(std::size_t n_dims, const std::vector<Code>& codes) {
  std::vector<std::vector<Instruction>> instructions;
  for (const Code& code : codes) {
    std::vector<Instruction>& added = instructions.emplace_back();
    for (const auto& [name, operand] : code) added.push_back(to_instruction(name, operand));
  }
  return {n_dims, std::move(instructions)};
}

const std::int64_t* checked_sizes(const Expressions& expressions,
                                  const std::vector<std::int64_t>& sizes) {
  if (sizes.size() != expressions.n_dims()) {
    throw ExpressionError("expected " + std::to_string(expressions.n_dims()) + " sizes, got " +
                          std::to_string(sizes.size()));
  }
  return sizes.data();
}

Operand evaluate(const Expressions& expressions, std::size_t index,
                 const std::vector<std::int64_t>& sizes) {
  if (index >= expressions.size()) throw ExpressionError("there is no such expression");
  const Number number = expressions.evaluate(index, checked_sizes(expressions, sizes));
  return number.is_real ? Operand(number.real) : Operand(number.integer);
}

std::vector<Operand> evaluate_all(const Expressions& expressions,
                                  const std::vector<std::int64_t>& sizes) {
  std::vector<Operand> results;
  for (std::size_t index = 0; index < expressions.size(); ++index) {
    results.push_back(evaluate(expressions, index, sizes));
  }
  return results;
}

}  // namespace

void register_expressions(py::module_& module) {
  std::vector<std::string> names(kOperationNames, kOperationNames + kOperationCount);
  module.attr("OPERATIONS") = names;
  py::class_<Expressions>(module, "Expressions", "Arithmetic over sizes, as postfix code.")
      .def(py::init(&make), py::arg("n_dims"), py::arg("codes"))
      .def("__len__", &Expressions::size)
      .def("evaluate", &evaluate, py::arg("index"), py::arg("sizes"))
      .def("evaluate_all", &evaluate_all, py::arg("sizes"));
}

}  // namespace offload
