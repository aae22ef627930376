// Operators on elements: arithmetic, functions of one variable, comparisons, selection.
#include <algorithm>
#include <functional>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

// Conversion for functions of real numbers: integers become doubles.
inline double as_real(std::int64_t x) { return static_cast<double>(x); }
inline double as_real(double x) { return x; }
inline float as_real(float x) { return x; }

// Of one input, with the number unchanged or converted to real.
#define UNARY_OF(name, made, expression)                                        \
  const Kernel k##name = {#name,                                                \
                          [](const Launch& launch) {                            \
                            map<1>(launch, [](auto number) {                    \
                              const auto x = made(number);                      \
                              return static_cast<decltype(number)>(expression); \
                            });                                                 \
                          },                                                    \
                          check_broadcast};
#define UNARY(name, expression) UNARY_OF(name, , expression)
#define REAL(name, expression) UNARY_OF(name, as_real, expression)

UNARY(Abs, x < 0 ? -x : x)
UNARY(LogicalNot, x == 0)
UNARY(Neg, -x)
UNARY(Relu, x < 0 ? 0 : x)
REAL(Ceil, std::ceil(x))
REAL(Cos, std::cos(x))
REAL(Erf, std::erf(x))
REAL(Exp, std::exp(x))
REAL(Floor, std::floor(x))
REAL(Gelu, x * 0.5 * (1 + std::erf(x * 0.70710678118654752440)))
REAL(GeluTanh, x * 0.5 * (1 + std::tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))))
REAL(IsFinite, std::isfinite(x))
REAL(Log, std::log(x))
REAL(Reciprocal, 1 / x)
REAL(Rsqrt, 1 / std::sqrt(x))
REAL(Sigmoid, 1 / (1 + std::exp(-x)))
REAL(Silu, x / (1 + std::exp(-x)))
REAL(Sin, std::sin(x))
REAL(Sqrt, std::sqrt(x))
REAL(Tanh, std::tanh(x))
#undef REAL
#undef UNARY
#undef UNARY_OF

// Of two inputs, or of one input and a number; some scaled by a factor alpha.
template <class T>
T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) throw std::runtime_error("an integer divided by zero");
  }
  return a / b;
}

// With the sign of the divisor.
template <class T>
T remainder(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    const T rest = a - divide(a, b) * b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  } else {
    return a - b * std::floor(a / b);
  }
}

#define BINARY(name, expression)                                                              \
  const Kernel k##name = {                                                                    \
      #name,                                                                                  \
      [](const Launch& launch) {                                                              \
        map<2>(launch, [&](auto a, auto b) { return static_cast<decltype(a)>(expression); }); \
      },                                                                                      \
      check_broadcast};                                                                       \
  const Kernel k##name##Scalar = {#name "Scalar",                                             \
                                  [](const Launch& launch) {                                  \
                                    map<1>(launch, [&](auto a) {                              \
                                      const auto b =                                          \
                                          value_of<decltype(a)>(launch.attributes.front());   \
                                      return static_cast<decltype(a)>(expression);            \
                                    });                                                       \
                                  },                                                          \
                                  check_broadcast};
#define ALPHA value_of<decltype(a)>(launch.attributes.back())

BINARY(Add, a + ALPHA * b)
BINARY(Sub, a - ALPHA * b)
BINARY(Rsub, b - ALPHA * a)
BINARY(Mul, (a * b))
BINARY(Remainder, remainder(a, b))
BINARY(Div, divide(a, b))
BINARY(Pow, std::pow(as_real(a), as_real(b)))
BINARY(Maximum, a < b ? b : a)
BINARY(Minimum, b < a ? b : a)
BINARY(Eq, a == b)
BINARY(Ne, a != b)
BINARY(Lt, a < b)
BINARY(Le, a <= b)
BINARY(Gt, a > b)
BINARY(Ge, a >= b)
BINARY(LogicalAnd, a != 0 && b != 0)
BINARY(LogicalOr, a != 0 || b != 0)
#undef BINARY
#undef ALPHA

const Kernel kAddFromScalar = {"AddV3",
                               [](const Launch& launch) {
                                 map<1>(launch, [&](auto b) {
                                   using T = decltype(b);
                                   return value_of<T>(launch.attributes.front()) +
                                          value_of<T>(launch.attributes.back()) * b;
                                 });
                               },
                               check_broadcast};

const Kernel kPowFromScalar = {
    "PowScalarTensor",
    [](const Launch& launch) {
      map<1>(launch, [&](auto b) {
        const auto a = value_of<decltype(b)>(launch.attributes.front());
        return static_cast<decltype(b)>(std::pow(as_real(a), as_real(b)));
      });
    },
    check_broadcast};

// Only for integers and booleans.
#define BITWISE(name, operation)                                                           \
  const Kernel kBitwise##name = {"Bitwise" #name,                                          \
                                 [](const Launch& launch) {                                \
                                   map_as<std::int64_t>(launch, operation<std::int64_t>(), \
                                                        std::make_index_sequence<2>());    \
                                 },                                                        \
                                 check_broadcast};                                         \
  const Kernel kBitwise##name##Scalar = {                                                  \
      "Bitwise" #name "Scalar",                                                            \
      [](const Launch& launch) {                                                           \
        const std::int64_t b = launch.attributes.front().integer();                        \
        map_as<std::int64_t>(                                                              \
            launch, [&](std::int64_t a) { return operation<std::int64_t>()(a, b); },       \
            std::make_index_sequence<1>());                                                \
      },                                                                                   \
      check_broadcast};
BITWISE(And, std::bit_and)
BITWISE(Or, std::bit_or)
BITWISE(Xor, std::bit_xor)
#undef BITWISE

const Kernel kBitwiseNot = {"BitwiseNot",
                            [](const Launch& launch) {
                              const bool is_boolean = launch.operands.front().type == kBool;
                              map_as<std::int64_t>(
                                  launch, [&](std::int64_t x) { return is_boolean ? x == 0 : ~x; },
                                  std::make_index_sequence<1>());
                            },
                            check_broadcast};

// Attributes: lowest, largest; either may be left out.
const Kernel kClamp = {"Clamp",
                       [](const Launch& launch) {
                         const Attribute& lowest = launch.attributes.at(0);
                         const Attribute& largest = launch.attributes.at(1);
                         map<1>(launch, [&](auto x) {
                           using T = decltype(x);
                           if (!lowest.integers.empty()) x = std::max(x, value_of<T>(lowest));
                           if (!largest.integers.empty()) x = std::min(x, value_of<T>(largest));
                           return x;
                         });
                       },
                       check_broadcast};

const Kernel kWhere = {
    "Where",
    [](const Launch& launch) {
      map<3>(launch, [](auto condition, auto a, auto b) { return condition != 0 ? a : b; });
    },
    check_broadcast};

const Kernel kMaskedFillScalar = {
    "MaskedFillScalar",
    [](const Launch& launch) {
      map<2>(launch, [&](auto x, auto mask) {
        return mask != 0 ? value_of<decltype(x)>(launch.attributes.front()) : x;
      });
    },
    check_broadcast};

// Operators of training: the gradient of relu, and what optimizers compute.
const Kernel kThresholdBackward = {
    "ThresholdBackward",
    [](const Launch& launch) {
      map<2>(launch, [&](auto gradient, auto x) {
        return x > value_of<decltype(x)>(launch.attributes.front()) ? gradient : decltype(x){};
      });
    },
    check_broadcast};

// Attribute: the factor.
#define SCALED_TERM(name, term)                                                                   \
  const Kernel k##name = {#name,                                                                  \
                          [](const Launch& launch) {                                              \
                            map<3>(launch, [&](auto x, auto a, auto b) {                          \
                              return static_cast<decltype(x)>(                                    \
                                  x + value_of<decltype(x)>(launch.attributes.front()) * (term)); \
                            });                                                                   \
                          },                                                                      \
                          check_broadcast};
SCALED_TERM(Addcmul, a* b)
SCALED_TERM(Addcdiv, divide(a, b))
#undef SCALED_TERM

const Kernel kLerp = {"Lerp",
                      [](const Launch& launch) {
                        map<3>(launch, [](auto start, auto end, auto weight) {
                          return start + weight * (end - start);
                        });
                      },
                      check_broadcast};
const Kernel kLerpScalar = {"LerpScalar",
                            [](const Launch& launch) {
                              map<2>(launch, [&](auto start, auto end) {
                                const auto weight =
                                    value_of<decltype(start)>(launch.attributes.front());
                                return start + weight * (end - start);
                              });
                            },
                            check_broadcast};

constexpr std::int64_t kApproximateTanh = 1;

const Kernel& gelu(std::int64_t approximate) {
  return approximate == kApproximateTanh ? kGeluTanh : kGelu;
}

}  // namespace

#define UNARY(name) OPERATOR(name, k##name, (const aclTensor* self, aclTensor* out), self, out)
#define UNARY_AND_INPLACE(name) \
  UNARY(name)                   \
  OPERATOR(Inplace##name, k##name, (aclTensor * self), self, self)

UNARY(Abs)
UNARY(BitwiseNot)
UNARY_AND_INPLACE(Ceil)
UNARY_AND_INPLACE(Cos)
UNARY_AND_INPLACE(Erf)
UNARY_AND_INPLACE(Exp)
UNARY_AND_INPLACE(Floor)
UNARY(Gelu)
UNARY(IsFinite)
UNARY_AND_INPLACE(Log)
UNARY_AND_INPLACE(LogicalNot)
UNARY_AND_INPLACE(Neg)
UNARY_AND_INPLACE(Reciprocal)
UNARY_AND_INPLACE(Relu)
UNARY_AND_INPLACE(Rsqrt)
UNARY_AND_INPLACE(Sigmoid)
UNARY(Silu)
UNARY_AND_INPLACE(Sin)
UNARY_AND_INPLACE(Sqrt)
UNARY_AND_INPLACE(Tanh)
OPERATOR(GeluV2, gelu(approximate),
         (const aclTensor* self, std::int64_t approximate, aclTensor* out), self, out)

// `tensors` and `scalars` are the operator's names with a tensor and with a number.
#define BINARY(tensors, scalars, kernel)                                                        \
  OPERATOR(tensors, k##kernel, (const aclTensor* self, const aclTensor* other, aclTensor* out), \
           self, other, out)                                                                    \
  OPERATOR(scalars, k##kernel##Scalar,                                                          \
           (const aclTensor* self, const aclScalar* other, aclTensor* out), self, other, out)
#define BINARY_INPLACE(tensors, scalars, kernel)                                                  \
  OPERATOR(Inplace##tensors, k##kernel, (aclTensor * self, const aclTensor* other), self, other,  \
           self)                                                                                  \
  OPERATOR(Inplace##scalars, k##kernel##Scalar, (aclTensor * self, const aclScalar* other), self, \
           other, self)
#define COMPARISON(name)                   \
  BINARY(name##Tensor, name##Scalar, name) \
  BINARY_INPLACE(name##Tensor, name##Scalar, name)

BINARY(Mul, Muls, Mul)
BINARY_INPLACE(Mul, Muls, Mul)
BINARY(Div, Divs, Div)
BINARY_INPLACE(Div, Divs, Div)
BINARY(PowTensorTensor, PowTensorScalar, Pow)
BINARY_INPLACE(PowTensorTensor, PowTensorScalar, Pow)
BINARY(RemainderTensorTensor, RemainderTensorScalar, Remainder)
COMPARISON(Eq)
COMPARISON(Ne)
COMPARISON(Lt)
COMPARISON(Le)
COMPARISON(Gt)
COMPARISON(Ge)

#define TENSORS_ONLY(name, kernel)                                                              \
  OPERATOR(name, kernel, (const aclTensor* self, const aclTensor* other, aclTensor* out), self, \
           other, out)

TENSORS_ONLY(Maximum, kMaximum)
TENSORS_ONLY(Minimum, kMinimum)
TENSORS_ONLY(LogicalAnd, kLogicalAnd)
TENSORS_ONLY(LogicalOr, kLogicalOr)
BINARY(BitwiseAndTensor, BitwiseAndScalar, BitwiseAnd)
BINARY(BitwiseOrTensor, BitwiseOrScalar, BitwiseOr)
BINARY(BitwiseXorTensor, BitwiseXorScalar, BitwiseXor)

#define SCALED(tensors, scalars, kernel)                                                           \
  OPERATOR(                                                                                        \
      tensors, k##kernel,                                                                          \
      (const aclTensor* self, const aclTensor* other, const aclScalar* alpha, aclTensor* out),     \
      self, other, alpha, out)                                                                     \
  OPERATOR(                                                                                        \
      scalars, k##kernel##Scalar,                                                                  \
      (const aclTensor* self, const aclScalar* other, const aclScalar* alpha, aclTensor* out),     \
      self, other, alpha, out)                                                                     \
  OPERATOR(Inplace##tensors, k##kernel,                                                            \
           (aclTensor * self, const aclTensor* other, const aclScalar* alpha), self, other, alpha, \
           self)                                                                                   \
  OPERATOR(Inplace##scalars, k##kernel##Scalar,                                                    \
           (aclTensor * self, const aclScalar* other, const aclScalar* alpha), self, other, alpha, \
           self)

SCALED(Add, Adds, Add)
SCALED(Sub, Subs, Sub)

OPERATOR(PowScalarTensor, kPowFromScalar,
         (const aclScalar* self, const aclTensor* exponent, aclTensor* out), self, exponent, out)
OPERATOR(Rsub, kRsub,
         (const aclTensor* self, const aclTensor* other, const aclScalar* alpha, aclTensor* out),
         self, other, alpha, out)
OPERATOR(Rsubs, kRsubScalar,
         (const aclTensor* self, const aclScalar* other, const aclScalar* alpha, aclTensor* out),
         self, other, alpha, out)
OPERATOR(Clamp, kClamp,
         (const aclTensor* self, const aclScalar* lowest, const aclScalar* largest, aclTensor* out),
         self, lowest, largest, out)
OPERATOR(ClampMin, kMaximumScalar, (const aclTensor* self, const aclScalar* lowest, aclTensor* out),
         self, lowest, out)
OPERATOR(ClampMax, kMinimumScalar,
         (const aclTensor* self, const aclScalar* largest, aclTensor* out), self, largest, out)
OPERATOR(AddV3, kAddFromScalar,
         (const aclScalar* self, const aclTensor* other, const aclScalar* alpha, aclTensor* out),
         self, other, alpha, out)
OPERATOR(SWhere, kWhere,
         (const aclTensor* condition, const aclTensor* self, const aclTensor* other,
          aclTensor* out),
         condition, self, other, out)
OPERATOR(InplaceMaskedFillScalar, kMaskedFillScalar,
         (aclTensor * self, const aclTensor* mask, const aclScalar* value), self, mask, value, self)

// Signatures: hiascend.com, CANN community edition, aolapi/context, the page of each operator.
OPERATOR(ThresholdBackward, kThresholdBackward,
         (const aclTensor* gradient, const aclTensor* self, const aclScalar* threshold,
          aclTensor* out),
         gradient, self, threshold, out)

#define SCALED_TERM(name)                                                                       \
  OPERATOR(name, k##name,                                                                       \
           (const aclTensor* self, const aclTensor* one, const aclTensor* other,                \
            const aclScalar* value, aclTensor* out),                                            \
           self, one, other, value, out)                                                        \
  OPERATOR(                                                                                     \
      Inplace##name, k##name,                                                                   \
      (aclTensor * self, const aclTensor* one, const aclTensor* other, const aclScalar* value), \
      self, one, other, value, self)

SCALED_TERM(Addcmul)
SCALED_TERM(Addcdiv)

OPERATOR(Lerp, kLerp,
         (const aclTensor* self, const aclTensor* end, const aclTensor* weight, aclTensor* out),
         self, end, weight, out)
OPERATOR(InplaceLerp, kLerp, (aclTensor * self, const aclTensor* end, const aclTensor* weight),
         self, end, weight, self)
OPERATOR(Lerps, kLerpScalar,
         (const aclTensor* self, const aclTensor* end, const aclScalar* weight, aclTensor* out),
         self, end, weight, out)
OPERATOR(InplaceLerps, kLerpScalar,
         (aclTensor * self, const aclTensor* end, const aclScalar* weight), self, end, weight, self)

}  // namespace simulated_operators
