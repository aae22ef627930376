// bfloat16 numbers: reading, rounding, and multiplying in pairs.
#pragma once

#include "vector.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace offload::kernels {

// The upper half of a float's bits.
struct BFloat16 {
  std::uint16_t bits;
};

using Words [[gnu::vector_size(kLanes * sizeof(std::uint32_t))]] = std::uint32_t;
using Halves [[gnu::vector_size(kLanes * sizeof(std::uint16_t))]] = std::uint16_t;

[[gnu::always_inline]] inline Words bits_of(Vector value) {
  Words bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[gnu::always_inline]] inline Vector vector_of(Words bits) {
  Vector value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// GCC 12 splits conversions of 16 lanes in two, and warns of its own unmasked intrinsics.
[[gnu::always_inline]] inline Words widened(Halves halves) {
#if defined(__AVX512F__)
  __m256i narrow;
  std::memcpy(&narrow, &halves, sizeof narrow);
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, narrow);
  Words words;
  std::memcpy(&words, &wide, sizeof words);
  return words;
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// The lower half of each lane.
[[gnu::always_inline]] inline Halves narrowed(Words words) {
#if defined(__AVX512F__)
  __m512i wide;
  std::memcpy(&wide, &words, sizeof wide);
  const __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xffff, wide);
  Halves halves;
  std::memcpy(&halves, &narrow, sizeof halves);
  return halves;
#else
  return __builtin_convertvector(words, Halves);
#endif
}

// Reads only the first `count` lanes; the others are zero.
template <int count>
[[gnu::always_inline]] inline Words load_first_halves(const BFloat16* from) {
  static_assert(0 < count && count <= kLanes);
  Halves halves{};
  std::memcpy(&halves, from, count * sizeof(BFloat16));
  return widened(halves);
}

[[gnu::always_inline]] inline Vector load(const BFloat16* from) {
  return vector_of(load_first_halves<kLanes>(from) << 16);
}

template <int count>
[[gnu::always_inline]] inline Vector load_first(const BFloat16* from) {
  return vector_of(load_first_halves<count>(from) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN: its upper half could be that of an infinity.
[[gnu::always_inline]] inline Halves rounded(Vector value) {
  const Words bits = bits_of(value);
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = (bits >> 16) | 0x40;
  return narrowed(value == value ? nearest : quiet);
}

template <int count>
[[gnu::always_inline]] inline void store_first(BFloat16* to, Vector value) {
  static_assert(0 < count && count <= kLanes);
  const Halves halves = rounded(value);
  std::memcpy(to, &halves, count * sizeof(BFloat16));
}

[[gnu::always_inline]] inline void store(BFloat16* to, Vector value) {
  store_first<kLanes>(to, value);
}

// Pairs of numbers, one per lane, for `add_products`. A processor that multiplies them itself sums
// in float32, to nearest, and treats subnormal numbers as zero.
#if defined(__AVX512BF16__) && defined(__AVX512F__)

using Pairs = Words;

[[gnu::always_inline]] inline Pairs pairs_of(Words bits) { return bits; }

// sum + the product of the first numbers of each pair + the product of the second ones.
[[gnu::always_inline]] inline Vector add_products(Vector sum, Pairs one, Pairs other) {
  __m512bh first, second;
  std::memcpy(&first, &one, sizeof first);
  std::memcpy(&second, &other, sizeof second);
  return _mm512_dpbf16_ps(sum, first, second);
}

[[gnu::always_inline]] inline void keep(Pairs& pairs) { asm("" : "+v"(pairs)); }

// The form in which a product reads its factors, and a pair of them in all lanes.
using Factor = BFloat16;

[[gnu::always_inline]] inline Pairs splat_pair(const Factor* from) {
  std::uint32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair - Words{};
}

// For the last number without a partner.
[[gnu::always_inline]] inline Pairs splat_first(const Factor* from) {
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits - Words{};
}

#else

struct Pairs {
  Vector first, second;
};

[[gnu::always_inline]] inline Pairs pairs_of(Words bits) {
  return {vector_of(bits << 16), vector_of(bits & 0xffff0000)};
}

[[gnu::always_inline]] inline Vector add_products(Vector sum, const Pairs& one,
                                                  const Pairs& other) {
  return sum + one.first * other.first + one.second * other.second;
}

[[gnu::always_inline]] inline void keep(Pairs& pairs) {
  keep(pairs.first);
  keep(pairs.second);
}

using Factor = float;

[[gnu::always_inline]] inline Pairs splat_pair(const Factor* from) {
  return {splat(from[0]), splat(from[1])};
}

[[gnu::always_inline]] inline Pairs splat_first(const Factor* from) {
  return {splat(*from), Vector{}};
}

#endif

[[gnu::always_inline]] inline Pairs load_pairs(const BFloat16* from) {
  Words bits;
  std::memcpy(&bits, from, sizeof bits);
  return pairs_of(bits);
}

// Reads only the first `count` numbers; the others are zero.
template <int count>
[[gnu::always_inline]] inline Pairs load_first_pairs(const BFloat16* from) {
  static_assert(0 < count && count <= 2 * kLanes);
  Words bits{};
  std::memcpy(&bits, from, count * sizeof(BFloat16));
  return pairs_of(bits);
}

}  // namespace offload::kernels
