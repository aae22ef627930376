// Postfix code in Python's form: pairs of an operation's name and its number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "offload/expressions.hpp"

namespace offload {

// int64 comes first, so that no Python integer becomes a double.
using Operand = std::variant<std::int64_t, double>;
using Code = std::vector<std::pair<std::string, Operand>>;

inline Instruction to_instruction(const std::string& name, const Operand& operand) {
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

// Throws ExpressionError for an invalid code.
inline Expressions to_expressions(std::size_t n_dims, const std::vector<Code>& codes) {
  std::vector<std::vector<Instruction>> instructions;
  for (const Code& code : codes) {
    std::vector<Instruction>& added = instructions.emplace_back();
    for (const auto& [name, operand] : code) added.push_back(to_instruction(name, operand));
  }
  return {n_dims, std::move(instructions)};
}

}  // namespace offload
