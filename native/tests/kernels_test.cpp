// Templates of compiled kernels, on memory that ends where a tensor does: sanitizers detect
// accesses beyond it, and float64 detects wrong results.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "attention.hpp"
#include "check.hpp"
#include "linear.hpp"
#include "linear_bfloat16.hpp"

namespace {

using offload::kernels::Activation;
using offload::kernels::Attention;
using offload::kernels::BFloat16;
using offload::kernels::Ending;
using offload::kernels::kPanelColumns;
using offload::kernels::Linear;
using offload::kernels::LinearBFloat16;
using offload::kernels::MaskStrides;
using offload::kernels::Order;
using offload::kernels::Strides;

float widened(float value) { return value; }
float widened(BFloat16 value) { return offload::kernels::load_first<1>(&value)[0]; }

// Exactly as many numbers as a tensor has, one past an allocator's alignment.
template <class Element>
class Numbers {
 public:
  explicit Numbers(long count)
      : count_(count), all_(new Element[static_cast<std::size_t>(count) + 1]) {
    std::normal_distribution<float> normal;
    for (long at = 0; at < count; ++at) {
      offload::kernels::store_first<1>(data() + at, offload::kernels::splat(normal(generator())));
    }
  }
  Element* data() { return all_.get() + 1; }
  const Element* data() const { return all_.get() + 1; }
  double operator[](long at) const { return widened(data()[at]); }
  long size() const { return count_; }

 private:
  static std::mt19937& generator() {
    static std::mt19937 one(1);
    return one;
  }

  long count_;
  std::unique_ptr<Element[]> all_;
};

// Half of a unit in the last place of 1: a result is rounded once.
template <class Element>
constexpr double kRounding = std::is_same_v<Element, float> ? 0.0 : 1.0 / 256;

// `rounded`: the intermediate value that was rounded, in addition to the result.
template <class Element>
bool is_near(double found, double expected, double rounded = 0.0) {
  return std::abs(found - expected) <=
         4e-5 * (1.0 + std::abs(expected)) +
             kRounding<Element> * (1.001 * std::abs(expected) + rounded);
}

template <class Element, long m_size, long n_size, long k_size, Order order, long w_stride,
          bool has_bias>
void run_product(const Numbers<Element>& x, const Numbers<Element>& w, const Element* bias,
                 Numbers<Element>& out) {
  constexpr Ending ending{Activation::kRelu, has_bias};
  if constexpr (std::is_same_v<Element, float>) {
    Linear<m_size, n_size, k_size, k_size, order, w_stride, n_size, ending>::run(
        x.data(), w.data(), {bias}, out.data());
  } else {
    LinearBFloat16<Element, m_size, n_size, k_size, k_size, order, w_stride, n_size, ending>::run(
        x.data(), w.data(), bias, out.data());
  }
}

template <class Element, long m_size, long n_size, long k_size, Order order, bool has_bias>
void check_product() {
  const Numbers<Element> x(m_size * k_size), w(k_size * n_size), bias(n_size);
  Numbers<Element> out(m_size * n_size), of_packed(m_size * n_size);
  constexpr long w_stride = order == Order::kRows ? n_size : k_size;
  const Element* const added = has_bias ? bias.data() : nullptr;
  run_product<Element, m_size, n_size, k_size, order, w_stride, has_bias>(x, w, added, out);
  constexpr long panels = (n_size + kPanelColumns - 1) / kPanelColumns;
  Numbers<Element> packed(panels * offload::kernels::panel_size<Element>(k_size));
  offload::kernels::pack<n_size, k_size, order, w_stride>(w.data(), packed.data());
  run_product<Element, m_size, n_size, k_size, Order::kPacked, 0, has_bias>(x, packed, added,
                                                                            of_packed);
  bool holds = true;
  for (long m = 0; m < m_size; ++m) {
    for (long n = 0; n < n_size; ++n) {
      double sum = has_bias ? bias[n] : 0.0;
      for (long k = 0; k < k_size; ++k) {
        const long at = order == Order::kRows ? k * n_size + n : n * k_size + k;
        sum += x[m * k_size + k] * w[at];
      }
      holds = holds && is_near<Element>(out[m * n_size + n], std::max(sum, 0.0)) &&
              is_near<Element>(of_packed[m * n_size + n], std::max(sum, 0.0));
    }
  }
  CHECK_THAT(holds);
}

// With a batch norm of the columns, of which some numbers may be missing.
template <long m_size, long n_size, long k_size, Order order>
void check_normed(bool has_bias) {
  constexpr float kEpsilon = 1e-3f;
  constexpr long w_stride = order == Order::kRows ? n_size : k_size;
  const Numbers<float> x(m_size * k_size), w(k_size * n_size);
  const Numbers<float> bias(n_size), weight(n_size), shift(n_size), mean(n_size);
  Numbers<float> variance(n_size), made(2 * n_size), out(m_size * n_size);
  for (long n = 0; n < n_size; ++n) variance.data()[n] = std::abs(variance.data()[n]);
  const auto terms = offload::kernels::norm_terms<n_size>(
      has_bias ? bias.data() : nullptr, has_bias ? weight.data() : nullptr,
      has_bias ? shift.data() : nullptr, mean.data(), variance.data(), kEpsilon, made.data());
  Linear<m_size, n_size, k_size, k_size, order, w_stride, n_size,
         Ending{Activation::kRelu, true, true}>::run(x.data(), w.data(), terms, out.data());
  bool holds = true;
  for (long m = 0; m < m_size; ++m) {
    for (long n = 0; n < n_size; ++n) {
      double sum = (has_bias ? bias[n] : 0.0) - mean[n];
      for (long k = 0; k < k_size; ++k) {
        sum += x[m * k_size + k] * w[order == Order::kRows ? k * n_size + n : n * k_size + k];
      }
      const double scale = (has_bias ? weight[n] : 1.0) / std::sqrt(variance[n] + kEpsilon);
      const double expected = std::max(sum * scale + (has_bias ? shift[n] : 0.0), 0.0);
      holds = holds &&
              std::abs(out[m * n_size + n] - expected) <= 1e-4 * (1.0 + std::abs(scale) + expected);
    }
  }
  CHECK_THAT(holds);
}

template <long m_size, long n_size, long k_size>
void check_products() {
  check_normed<m_size, n_size, k_size, Order::kColumns>(true);
  check_normed<m_size, n_size, k_size, Order::kRows>(false);
  check_product<float, m_size, n_size, k_size, Order::kColumns, true>();
  check_product<float, m_size, n_size, k_size, Order::kColumns, false>();
  check_product<float, m_size, n_size, k_size, Order::kRows, true>();
  check_product<BFloat16, m_size, n_size, k_size, Order::kColumns, true>();
  check_product<BFloat16, m_size, n_size, k_size, Order::kColumns, false>();
  check_product<BFloat16, m_size, n_size, k_size, Order::kRows, true>();
}

// Every number in bfloat16, and the numbers on both sides of a tie between two of them.
void check_rounding() {
  using offload::kernels::splat;
  bool holds = true;
  for (std::uint32_t upper = 0; upper < 1u << 16; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const std::uint32_t bits = upper << 16 | lower;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      BFloat16 found;
      offload::kernels::store_first<1>(&found, splat(value));
      if (std::isnan(value)) {
        holds = holds && std::isnan(widened(found));
        continue;
      }
      const bool is_up = lower > 0x8000u || (lower == 0x8000u && upper % 2 == 1);
      holds = holds && found.bits == static_cast<std::uint16_t>(upper + (is_up ? 1 : 0));
    }
  }
  CHECK_THAT(holds);
}

template <Activation activation>
float activated(float value) {
  return offload::kernels::activated<activation>(offload::kernels::splat(value))[0];
}

void check_activations() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK_THAT(std::isnan(activated<Activation::kRelu>(nan)));
  CHECK_THAT(std::isnan(activated<Activation::kGelu>(nan)));
  CHECK_THAT(std::isnan(activated<Activation::kSilu>(nan)));
  CHECK_THAT(std::isnan(activated<Activation::kTanh>(nan)));
  CHECK_THAT(std::isnan(activated<Activation::kSigmoid>(nan)));
  CHECK_THAT(activated<Activation::kTanh>(kInfinity) == 1.0f);
  CHECK_THAT(activated<Activation::kTanh>(-kInfinity) == -1.0f);
  CHECK_THAT(activated<Activation::kSigmoid>(kInfinity) == 1.0f);
  CHECK_THAT(activated<Activation::kSigmoid>(-kInfinity) == 0.0f);
  for (float x = -20.0f; x <= 20.0f; x += 0.01f) {
    const double wide = x;
    CHECK_THAT(std::abs(activated<Activation::kTanh>(x) - std::tanh(wide)) <=
               2e-7 * std::abs(std::tanh(wide)) + 1e-37);
    CHECK_THAT(std::abs(activated<Activation::kSigmoid>(x) - 1.0 / (1.0 + std::exp(-wide))) < 2e-7);
    CHECK_THAT(std::abs(activated<Activation::kGelu>(x) -
                        0.5 * wide * (1.0 + std::erf(wide / std::sqrt(2.0)))) <
               2e-7 * (1.0 + std::abs(wide)));
  }
}

void check_exponential() {
  using offload::kernels::exponential;
  using offload::kernels::splat;
  for (float x = -87.0f; x < 88.0f; x += 0.013f) {
    const double expected = std::exp(static_cast<double>(x));
    CHECK_THAT(std::abs(exponential(splat(x))[0] - expected) <= 1.2e-7 * expected);
  }
  CHECK_THAT(exponential(splat(89.0f))[0] == std::numeric_limits<float>::infinity());
  CHECK_THAT(exponential(splat(-200.0f))[0] == 0.0f);
  CHECK_THAT(exponential(splat(-std::numeric_limits<float>::infinity()))[0] == 0.0f);
}

template <class Element, class MaskElement, long rows, long columns, long width, bool is_causal>
void check_attention() {
  constexpr long heads = 2;
  const Numbers<Element> q(heads * rows * width), k(heads * columns * width);
  const Numbers<Element> v(heads * columns * width);
  const Numbers<MaskElement> mask(columns);
  Numbers<Element> out(heads * rows * width);
  constexpr Strides asked{heads * rows * width, rows * width, width};
  constexpr Strides known{heads * columns * width, columns * width, width};
  Attention<Element, MaskElement, 1, heads, 1, rows, columns, width, width, asked, known, known,
            asked, is_causal, true, MaskStrides{0, 0, 0, 1}>::run(q.data(), k.data(), v.data(),
                                                                  mask.data(), out.data(), 0.3f);
  bool holds = true;
  for (long head = 0; head < heads; ++head) {
    for (long row = 0; row < rows; ++row) {
      std::vector<double> weights;
      double sum = 0.0;
      for (long column = 0; column < (is_causal ? std::min(row + 1, columns) : columns); ++column) {
        double score = 0.0;
        for (long at = 0; at < width; ++at) {
          score += q[(head * rows + row) * width + at] * k[(head * columns + column) * width + at];
        }
        weights.push_back(std::exp(score * 0.3 + mask[column]));
        sum += weights.back();
      }
      for (long at = 0; at < width; ++at) {
        double expected = 0.0, rounded = 0.0;
        for (std::size_t column = 0; column < weights.size(); ++column) {
          const double product =
              weights[column] / sum * v[(head * columns + static_cast<long>(column)) * width + at];
          expected += product;
          rounded += std::abs(product);
        }
        holds = holds && is_near<Element>(out[(head * rows + row) * width + at], expected, rounded);
      }
    }
  }
  CHECK_THAT(holds);
}

template <long rows, long columns, long width, bool is_causal>
void check_attentions() {
  check_attention<float, float, rows, columns, width, is_causal>();
  check_attention<BFloat16, BFloat16, rows, columns, width, is_causal>();
  check_attention<BFloat16, float, rows, columns, width, is_causal>();
}

}  // namespace

int main() {
  check_products<1, 1, 1>();
  check_products<1, 64, 64>();
  check_products<1, 33, 67>();
  check_products<3, 17, 5>();
  check_products<4, 48, 32>();
  check_products<2, 70, 9>();
  check_products<9, 50, 67>();
  check_products<13, 7, 300>();
  check_products<16, 96, 513>();
  check_products<25, 33, 769>();
  check_products<100, 40, 769>();
  check_rounding();
  check_activations();
  check_exponential();
  check_attentions<1, 70, 32, false>();
  check_attentions<5, 5, 8, true>();
  check_attentions<37, 4, 5, true>();
  check_attentions<20, 33, 16, false>();
  return offload::test::result();
}
