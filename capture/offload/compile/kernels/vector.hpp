// Vectors of floats in registers, by the vector extension of GCC and clang: no intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace offload::kernels {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using Vector [[gnu::vector_size(kLanes * sizeof(float))]] = float;
using Integers [[gnu::vector_size(kLanes * sizeof(std::int32_t))]] = std::int32_t;

[[gnu::always_inline]] inline Vector splat(float value) { return value - Vector{}; }

// Addresses need not be aligned.
[[gnu::always_inline]] inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

[[gnu::always_inline]] inline void store(float* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}

// Prefetches `size_bytes` at `ahead_bytes` behind an address. That memory need not exist.
template <long size_bytes>
[[gnu::always_inline]] inline void prefetch(const void* from, long ahead_bytes) {
  constexpr long kLineBytes = 64;
  const std::uintptr_t begin =
      reinterpret_cast<std::uintptr_t>(from) + static_cast<std::uintptr_t>(ahead_bytes);
#pragma GCC unroll 8
  for (long at = 0; at < size_bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + static_cast<std::uintptr_t>(at)));
  }
}

// Keeps a value with several uses in a register: compilers would load it again for each use.
[[gnu::always_inline]] inline void keep(Vector& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  static_cast<void>(value);
#endif
}

// Reads only the first `count` lanes; the others are zero.
template <int count>
[[gnu::always_inline]] inline Vector load_first(const float* from) {
  static_assert(0 < count && count <= kLanes);
  Vector value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

template <int count>
[[gnu::always_inline]] inline void store_first(float* to, Vector value) {
  static_assert(0 < count && count <= kLanes);
  std::memcpy(to, &value, count * sizeof(float));
}

// Returns the second if either is NaN.
[[gnu::always_inline]] inline Vector larger(Vector one, Vector other) {
  return one > other ? one : other;
}

[[gnu::always_inline]] inline Vector smaller(Vector one, Vector other) {
  return one < other ? one : other;
}

namespace detail {

template <std::size_t... lanes>
[[gnu::always_inline]] inline Vector every_other(Vector one, Vector other,
                                                 std::index_sequence<lanes...>) {
  return __builtin_shufflevector(one, other, (2 * lanes)...);
}

template <int distance, std::size_t... lanes>
[[gnu::always_inline]] inline Vector folded(Vector one, Vector other,
                                            std::index_sequence<lanes...>) {
  return __builtin_shufflevector(one, other, (lanes & distance ? lanes + kLanes : lanes)...) +
         __builtin_shufflevector(
             one, other, (lanes & distance ? (lanes ^ distance) + kLanes : lanes ^ distance)...);
}

// Sums of vectors `distance` apart, recursively down to 1.
template <int distance>
[[gnu::always_inline]] inline Vector sums(const Vector* vectors) {
  using Lanes = std::make_index_sequence<kLanes>;
  if constexpr (distance == 1) {
    return folded<1>(vectors[0], vectors[1], Lanes());
  } else {
    return folded<distance>(sums<distance / 2>(vectors), sums<distance / 2>(vectors + distance),
                            Lanes());
  }
}

}  // namespace detail

// Lanes 0, 2, 4 and so on of two adjacent vectors.
[[gnu::always_inline]] inline Vector every_other(Vector one, Vector other) {
  return detail::every_other(one, other, std::make_index_sequence<kLanes>());
}

// For as many vectors as there are lanes: lane i of the result is the sum of vector i.
[[gnu::always_inline]] inline Vector sums_of(const Vector (&vectors)[kLanes]) {
  return detail::sums<kLanes / 2>(vectors);
}

namespace detail {

// Combines each lane with the one `distance` away, by halves, quarters and so on, until each lane
// has all.
template <int distance, class Combine, std::size_t... lanes>
[[gnu::always_inline]] inline Vector combined(Vector value, const Combine& combine,
                                              std::index_sequence<lanes...> all) {
  value = combine(value, __builtin_shufflevector(value, value, (lanes ^ distance)...));
  if constexpr (distance > 1) return combined<distance / 2>(value, combine, all);
  return value;
}

}  // namespace detail

[[gnu::always_inline]] inline float sum_of(Vector value) {
  const auto add = [](Vector one, Vector other) { return one + other; };
  return detail::combined<kLanes / 2>(value, add, std::make_index_sequence<kLanes>())[0];
}

[[gnu::always_inline]] inline float largest_of(Vector value) {
  return detail::combined<kLanes / 2>(value, larger, std::make_index_sequence<kLanes>())[0];
}

// e to the power of x, within 1 unit in the last place unless it is subnormal: x is reduced by
// multiples of ln 2 in two parts (W. J. Cody and W. Waite, "Software Manual for the Elementary
// Functions", 1980, chapter 6), and the rest, at most ln 2 / 2, is summed by Taylor's series to its
// 7th power, whose error is below 6e-9.
[[gnu::always_inline]] inline Vector exponential(Vector x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = larger(splat(-120.0f), smaller(splat(100.0f), x));
  const Vector n = (x * 1.44269504f + kRound) - kRound;
  const Vector rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector sum = rest * (1.0f / 5040.0f) + 1.0f / 720.0f;
  sum = sum * rest + 1.0f / 120.0f;
  sum = sum * rest + 1.0f / 24.0f;
  sum = sum * rest + 1.0f / 6.0f;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  // In two factors, so that neither overflows unless the product does.
  const Integers power = __builtin_convertvector(n, Integers);
  const Integers half = power >> 1;
  const Integers one = (half + 127) << 23;
  const Integers other = (power - half + 127) << 23;
  Vector first, second;
  std::memcpy(&first, &one, sizeof first);
  std::memcpy(&second, &other, sizeof second);
  return sum * first * second;
}

// The error function within 1.5e-7: M. Abramowitz and I. A. Stegun, "Handbook of Mathematical
// Functions", 1964, formula 7.1.26.
[[gnu::always_inline]] inline Vector error_function(Vector x) {
  const Vector size = x < 0.0f ? -x : x;
  const Vector t = 1.0f / (1.0f + 0.3275911f * size);
  Vector sum = 1.061405429f * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const Vector found = 1.0f - sum * t * exponential(-(x * x));
  return x < 0.0f ? -found : found;
}

// The hyperbolic tangent; below 0.625 the polynomial of S. L. Moshier's Cephes library (tanhf).
[[gnu::always_inline]] inline Vector hyperbolic_tangent(Vector x) {
  const Vector size = x < 0.0f ? -x : x;
  const Vector square = x * x;
  Vector sum = -5.70498872745e-3f * square + 2.06390887954e-2f;
  sum = sum * square - 5.37397155531e-2f;
  sum = sum * square + 1.33314422036e-1f;
  sum = sum * square - 3.33332819422e-1f;
  const Vector small = x + x * square * sum;
  const Vector far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  const Vector large = x < 0.0f ? -far : far;
  return size < 0.625f ? small : large;
}

}  // namespace offload::kernels
