// One template for every operator that computes each element of its output from one element of
// each input: strides, offsets and broadcast are honoured, and types are converted.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "argument_block.hpp"
#include "elements.hpp"

namespace simulated_operators {

template <std::size_t N>
using Offsets = std::array<std::int64_t, N>;

// Strides of `operand` as seen from a tensor of `shape`, in bytes: 0 where it is broadcast. Throws
// std::invalid_argument where the shapes do not broadcast.
inline std::array<std::int64_t, kMaxRank> broadcast_strides(const Operand& operand,
                                                            const Operand& shape) {
  std::array<std::int64_t, kMaxRank> strides{};
  const std::int64_t n_missing = shape.rank - operand.rank;
  if (n_missing < 0) throw std::invalid_argument("an operand of more dimensions than the result");
  for (std::int64_t dim = 0; dim < operand.rank; ++dim) {
    const std::int64_t extent = operand.shape[dim];
    if (extent == 1) continue;
    if (extent != shape.shape[dim + n_missing]) {
      throw std::invalid_argument("shapes that do not broadcast");
    }
    strides[static_cast<std::size_t>(dim + n_missing)] =
        operand.strides[dim] * element_bytes(operand.type);
  }
  return strides;
}

// Calls `body` with the offsets in bytes of each element of `shape`, in row-major order.
template <std::size_t N, class Body>
void walk(const Operand& shape, const std::array<std::array<std::int64_t, kMaxRank>, N>& strides,
          const Body& body) {
  const std::int64_t n_elements = shape.n_elements();
  std::int64_t index[kMaxRank] = {};
  Offsets<N> offsets{};
  for (std::int64_t element = 0; element < n_elements; ++element) {
    body(offsets);
    for (std::int64_t dim = shape.rank; dim-- > 0;) {
      const auto at = static_cast<std::size_t>(dim);
      const bool wraps = ++index[dim] == shape.shape[dim];
      const std::int64_t steps = wraps ? 1 - shape.shape[dim] : 1;
      for (std::size_t i = 0; i < N; ++i) offsets[i] += steps * strides[i][at];
      if (!wraps) break;
      index[dim] = 0;
    }
  }
}

// The type that a launch computes in: the widest that its operands need.
enum class Arithmetic { kInteger, kFloat, kDouble };

inline Arithmetic arithmetic_of(const Launch& launch) {
  bool has_float = false;
  bool has_integer = false;
  for (const Operand& operand : launch.operands) {
    if (!operand.is_given()) continue;
    if (operand.type == kDouble) return Arithmetic::kDouble;
    (is_real(operand.type) ? has_float : has_integer) = true;
  }
  if (has_float) return Arithmetic::kFloat;
  for (const Attribute& attribute : launch.attributes) {
    // A double holds every integer that tests compare with a real number.
    if (attribute.is_real) return Arithmetic::kDouble;
  }
  return has_integer ? Arithmetic::kInteger : Arithmetic::kFloat;
}

// Calls `visit` with a zero of the type that the launch computes in.
template <class Visit>
void with_arithmetic(const Launch& launch, const Visit& visit) {
  switch (arithmetic_of(launch)) {
    case Arithmetic::kInteger:
      return visit(std::int64_t{});
    case Arithmetic::kFloat:
      return visit(float{});
    case Arithmetic::kDouble:
      return visit(double{});
  }
}

template <class Computed>
Computed value_of(const Attribute& attribute) {
  if (attribute.integers.empty()) return Computed{1};  // a missing factor
  return std::is_integral_v<Computed> && !attribute.is_real
             ? static_cast<Computed>(attribute.integer())
             : static_cast<Computed>(attribute.real);
}

template <class Computed, class Function, std::size_t... I>
void map_as(const Launch& launch, const Function& function, std::index_sequence<I...>) {
  constexpr std::size_t kInputs = sizeof...(I);
  const Operand& output = launch.operands.at(kInputs);
  const std::array<std::array<std::int64_t, kMaxRank>, kInputs + 1> strides = {
      broadcast_strides(launch.operands.at(I), output)..., broadcast_strides(output, output)};
  const std::array<Load<Computed>, kInputs> loads = {loader<Computed>(launch.operands[I].type)...};
  const Store<Computed> store_output = storer<Computed>(output.type);
  walk(output, strides, [&](const Offsets<kInputs + 1>& offsets) {
    const Computed value =
        static_cast<Computed>(function(loads[I](launch.operands[I].data + offsets[I])...));
    store_output(output.data + offsets[kInputs], value);
  });
}

// Operands: `n_inputs` inputs, then the output. `function` is called with values of one arithmetic
// type, and returns values of that type's range.
template <std::size_t n_inputs, class Function>
void map(const Launch& launch, const Function& function) {
  with_arithmetic(launch, [&](auto zero) {
    map_as<decltype(zero)>(launch, function, std::make_index_sequence<n_inputs>());
  });
}

// For first phases: throws std::invalid_argument unless all operands broadcast to the last, and
// have types that are computed with.
inline void check_broadcast(const Launch& launch) {
  for (const Operand& operand : launch.operands) broadcast_strides(operand, launch.operands.back());
}

}  // namespace simulated_operators
