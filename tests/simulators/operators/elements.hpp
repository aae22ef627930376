// Elements of tensors: conversion of each type from and to a type that is computed with.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "runtime_calls.hpp"

namespace simulated_operators {

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bfloat16 {
  std::uint16_t bits;
  Bfloat16() = default;
  // Rounds to nearest, ties to even; NaN stays NaN.
  explicit Bfloat16(float value) {
    const std::uint32_t wide = float_to_bits(value);
    const bool is_nan = (wide & 0x7fffffffU) > 0x7f800000U;
    bits = static_cast<std::uint16_t>(is_nan ? (wide >> 16) | 0x40U
                                             : (wide + 0x7fffU + ((wide >> 16) & 1U)) >> 16);
  }
  explicit operator float() const { return bits_to_float(std::uint32_t{bits} << 16); }
};

struct Half {
  std::uint16_t bits;
  Half() = default;
  explicit Half(float value);  // rounds to nearest, ties to even
  explicit operator float() const;
};

template <class Stored, class Computed>
Computed load(const char* address) {
  Stored value;
  std::memcpy(&value, address, sizeof value);
  if constexpr (std::is_same_v<Stored, Half> || std::is_same_v<Stored, Bfloat16>) {
    return static_cast<Computed>(static_cast<float>(value));
  } else {
    return static_cast<Computed>(value);
  }
}

template <class Stored, class Computed>
void store(char* address, Computed computed) {
  Stored value;
  if constexpr (std::is_same_v<Stored, bool>) {
    value = computed != Computed{};
  } else if constexpr (std::is_same_v<Stored, Half> || std::is_same_v<Stored, Bfloat16>) {
    value = Stored(static_cast<float>(computed));
  } else {
    value = static_cast<Stored>(computed);
  }
  std::memcpy(address, &value, sizeof value);
}

// Calls `visit` with a null pointer of the type that holds such elements. Throws
// std::invalid_argument for a type that the operators do not compute with.
template <class Visit>
auto with_type(DataType type, const Visit& visit) {
  switch (type) {
    case kFloat:
      return visit(static_cast<float*>(nullptr));
    case kFloat16:
      return visit(static_cast<Half*>(nullptr));
    case kBfloat16:
      return visit(static_cast<Bfloat16*>(nullptr));
    case kDouble:
      return visit(static_cast<double*>(nullptr));
    case kInt8:
      return visit(static_cast<std::int8_t*>(nullptr));
    case kInt16:
      return visit(static_cast<std::int16_t*>(nullptr));
    case kInt32:
      return visit(static_cast<std::int32_t*>(nullptr));
    case kInt64:
      return visit(static_cast<std::int64_t*>(nullptr));
    case kUint8:
      return visit(static_cast<std::uint8_t*>(nullptr));
    case kUint64:
      return visit(static_cast<std::uint64_t*>(nullptr));
    case kBool:
      return visit(static_cast<bool*>(nullptr));
    default:
      throw std::invalid_argument("an element type that the operators do not compute with");
  }
}

template <class Computed>
using Load = Computed (*)(const char*);
template <class Computed>
using Store = void (*)(char*, Computed);

template <class Computed>
Load<Computed> loader(DataType type) {
  return with_type(type, [](auto* stored) -> Load<Computed> {
    return &load<std::remove_pointer_t<decltype(stored)>, Computed>;
  });
}

template <class Computed>
Store<Computed> storer(DataType type) {
  return with_type(type, [](auto* stored) -> Store<Computed> {
    return &store<std::remove_pointer_t<decltype(stored)>, Computed>;
  });
}

inline std::int64_t element_bytes(DataType type) {
  return with_type(type, [](auto* stored) {
    return static_cast<std::int64_t>(sizeof(std::remove_pointer_t<decltype(stored)>));
  });
}

bool is_supported(DataType type);
bool is_real(DataType type);  // floating point

}  // namespace simulated_operators
