// Templates of compiled kernels, on memory that ends where a tensor does: the sanitizers see what
// reads or writes beyond it, and float64 what is wrong.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention.hpp"
#include "check.hpp"
#include "linear.hpp"

namespace {

using offload::kernels::Activation;
using offload::kernels::Attention;
using offload::kernels::kPanelColumns;
using offload::kernels::Linear;
using offload::kernels::MaskStrides;
using offload::kernels::Order;
using offload::kernels::Strides;

// Just as many numbers as a tensor has, one float beyond what an allocator aligns to.
class Floats {
 public:
  explicit Floats(long count)
      : count_(count), all_(new float[static_cast<std::size_t>(count) + 1]) {
    std::normal_distribution<float> normal;
    for (long at = 0; at < count; ++at) data()[at] = normal(generator());
  }
  float* data() { return all_.get() + 1; }
  const float* data() const { return all_.get() + 1; }
  float& operator[](long at) { return data()[at]; }
  float operator[](long at) const { return data()[at]; }
  long size() const { return count_; }

 private:
  static std::mt19937& generator() {
    static std::mt19937 one(1);
    return one;
  }

  long count_;
  std::unique_ptr<float[]> all_;
};

bool is_near(double found, double expected) {
  return std::abs(found - expected) <= 2e-5 * (1.0 + std::abs(expected));
}

template <long m_size, long n_size, long k_size, Order order, bool has_bias>
void check_product() {
  const Floats x(m_size * k_size), w(k_size * n_size), bias(n_size);
  Floats out(m_size * n_size);
  constexpr long w_stride = order == Order::kRows ? n_size : k_size;
  const float* const added = has_bias ? bias.data() : nullptr;
  Linear<m_size, n_size, k_size, k_size, order, w_stride, n_size, Activation::kRelu, has_bias>::run(
      x.data(), w.data(), added, out.data());
  constexpr long panels = (n_size + kPanelColumns - 1) / kPanelColumns;
  Floats packed(panels * kPanelColumns * k_size), of_packed(m_size * n_size);
  offload::kernels::pack<n_size, k_size, order, w_stride>(w.data(), packed.data());
  Linear<m_size, n_size, k_size, k_size, Order::kPacked, 0, n_size, Activation::kRelu,
         has_bias>::run(x.data(), packed.data(), added, of_packed.data());
  bool holds = true;
  for (long m = 0; m < m_size; ++m) {
    for (long n = 0; n < n_size; ++n) {
      double sum = has_bias ? bias[n] : 0.0;
      for (long k = 0; k < k_size; ++k) {
        const long at = order == Order::kRows ? k * n_size + n : n * k_size + k;
        sum += static_cast<double>(x[m * k_size + k]) * w[at];
      }
      holds = holds && is_near(out[m * n_size + n], std::max(sum, 0.0)) &&
              is_near(of_packed[m * n_size + n], std::max(sum, 0.0));
    }
  }
  CHECK_THAT(holds);
}

template <long m_size, long n_size, long k_size>
void check_products() {
  check_product<m_size, n_size, k_size, Order::kColumns, true>();
  check_product<m_size, n_size, k_size, Order::kColumns, false>();
  check_product<m_size, n_size, k_size, Order::kRows, true>();
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

template <long rows, long columns, long width, bool is_causal>
void check_attention() {
  constexpr long heads = 2;
  const Floats q(heads * rows * width), k(heads * columns * width), v(heads * columns * width);
  const Floats mask(columns);
  Floats out(heads * rows * width);
  constexpr Strides asked{heads * rows * width, rows * width, width};
  constexpr Strides known{heads * columns * width, columns * width, width};
  Attention<1, heads, 1, rows, columns, width, width, asked, known, known, asked, is_causal, true,
            MaskStrides{0, 0, 0, 1}>::run(q.data(), k.data(), v.data(), mask.data(), out.data(),
                                          0.3f);
  bool holds = true;
  for (long head = 0; head < heads; ++head) {
    for (long row = 0; row < rows; ++row) {
      std::vector<double> weights;
      double sum = 0.0;
      for (long column = 0; column < (is_causal ? std::min(row + 1, columns) : columns); ++column) {
        double score = 0.0;
        for (long at = 0; at < width; ++at) {
          score += static_cast<double>(q[(head * rows + row) * width + at]) *
                   k[(head * columns + column) * width + at];
        }
        weights.push_back(std::exp(score * 0.3 + mask[column]));
        sum += weights.back();
      }
      for (long at = 0; at < width; ++at) {
        double expected = 0.0;
        for (std::size_t column = 0; column < weights.size(); ++column) {
          expected +=
              weights[column] / sum * v[(head * columns + static_cast<long>(column)) * width + at];
        }
        holds = holds && is_near(out[(head * rows + row) * width + at], expected);
      }
    }
  }
  CHECK_THAT(holds);
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
  check_activations();
  check_exponential();
  check_attention<1, 70, 32, false>();
  check_attention<5, 5, 8, true>();
  check_attention<37, 4, 5, true>();
  check_attention<20, 33, 16, false>();
  return offload::test::result();
}
