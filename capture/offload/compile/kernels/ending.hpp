// What is applied to a product's sums before they are written: a bias or a batch norm, an added
// tensor, and an activation.
#pragma once

#include "vector.hpp"

namespace offload::kernels {

enum class Activation {
  kNone,
  kRelu,
  kRelu6,
  kGelu,
  kGeluTanh,
  kSilu,
  kHardswish,
  kTanh,
  kSigmoid
};

// Like torch's operators: NaN stays NaN.
template <Activation activation>
[[gnu::always_inline]] inline Vector activated(Vector x) {
  if constexpr (activation == Activation::kRelu) {
    return x < 0.0f ? Vector{} : x;
  } else if constexpr (activation == Activation::kRelu6) {
    return x < 0.0f ? Vector{} : (x > 6.0f ? splat(6.0f) : x);
  } else if constexpr (activation == Activation::kHardswish) {
    return x * activated<Activation::kRelu6>(x + 3.0f) * (1.0f / 6.0f);
  } else if constexpr (activation == Activation::kGelu) {
    return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
  } else if constexpr (activation == Activation::kGeluTanh) {
    const Vector inner = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
  } else if constexpr (activation == Activation::kSilu) {
    return x / (1.0f + exponential(-x));
  } else if constexpr (activation == Activation::kTanh) {
    return hyperbolic_tangent(x);
  } else if constexpr (activation == Activation::kSigmoid) {
    return 1.0f / (1.0f + exponential(-x));
  } else {
    return x;
  }
}

// Applied to a sum: times the scale of its channel, plus the bias of its channel, plus the number
// at its place in the added tensor, then the activation. A scaled sum has a bias.
struct Ending {
  Activation activation = Activation::kNone;
  bool has_bias = false;
  bool is_scaled = false;
  bool has_added = false;
};

// The operands of an ending; null if it has none.
struct Terms {
  const float* bias = nullptr;
  const float* scale = nullptr;
  const float* added = nullptr;
};

// The terms for an operand that many channels further, and that many places further in the result.
template <Ending ending>
[[gnu::always_inline]] inline Terms moved(Terms terms, long channels, long places) {
  if constexpr (ending.has_bias) terms.bias += channels;
  if constexpr (ending.is_scaled) terms.scale += channels;
  if constexpr (ending.has_added) terms.added += places;
  return terms;
}

// A batch norm of known statistics as a scale and a bias by channel (S. Ioffe and C. Szegedy,
// "Batch normalization", 2015, algorithm 2). `bias` belongs to what is normalised. It, `weight` and
// `shift` may be null. `made` is memory for both results, 2 * channels floats.
template <long channels>
Terms norm_terms(const float* bias, const float* weight, const float* shift, const float* mean,
                 const float* variance, float epsilon, float* made) {
  float* const scale = made;
  float* const summand = made + channels;
  const auto terms_of = [=]<int count>(long at) __attribute__((always_inline)) {
    const Vector spread = load_first<count>(variance + at) + epsilon;
    Vector root;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) root[lane] = __builtin_sqrtf(spread[lane]);
    Vector factor = 1.0f / root;
    if (weight != nullptr) factor *= load_first<count>(weight + at);
    Vector centre = load_first<count>(mean + at);
    if (bias != nullptr) centre -= load_first<count>(bias + at);
    Vector rest = -centre * factor;
    if (shift != nullptr) rest += load_first<count>(shift + at);
    store_first<count>(scale + at, factor);
    store_first<count>(summand + at, rest);
  };
  constexpr long whole = channels / kLanes * kLanes;
  for (long at = 0; at < whole; at += kLanes) terms_of.template operator()<kLanes>(at);
  if constexpr (whole < channels) {
    terms_of.template operator()<static_cast<int>(channels - whole)>(whole);
  }
  return {summand, scale};
}

}  // namespace offload::kernels
