// Templates of convolutions and pooling, on memory that ends where a tensor does: sanitizers detect
// accesses beyond it, and float64 detects wrong results.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "convolution.hpp"
#include "pooling.hpp"

namespace {

using offload::kernels::Activation;
using offload::kernels::Convolution;
using offload::kernels::ConvolutionOfFewPixels;
using offload::kernels::ConvolutionSizes;
using offload::kernels::DepthwiseConvolution;
using offload::kernels::Ending;
using offload::kernels::MaxPool;
using offload::kernels::Order;
using offload::kernels::PaddedImages;
using offload::kernels::PointwiseConvolution;
using offload::kernels::PoolSizes;
using offload::kernels::Terms;

constexpr float kEpsilon = 1e-3f;

// Exactly as many numbers as a tensor has.
std::unique_ptr<float[]> numbers(long count) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::unique_ptr<float[]> made(new float[static_cast<std::size_t>(count)]);
  for (long at = 0; at < count; ++at) made[static_cast<std::size_t>(at)] = normal(generator);
  return made;
}

// A number of the convolution, without bias.
double expected_at(const ConvolutionSizes& sizes, const float* x, const float* w, long image,
                   long channel, long row, long column) {
  const long inputs = sizes.channels / sizes.groups;
  const long group = channel / (sizes.out_channels / sizes.groups);
  double sum = 0;
  for (long input = 0; input < inputs; ++input) {
    for (long y = 0; y < sizes.kernel_height; ++y) {
      for (long z = 0; z < sizes.kernel_width; ++z) {
        const long from_row =
            row * sizes.stride_height - sizes.padding_height + y * sizes.dilation_height;
        const long from_column =
            column * sizes.stride_width - sizes.padding_width + z * sizes.dilation_width;
        if (from_row < 0 || from_row >= sizes.height || from_column < 0 ||
            from_column >= sizes.width) {
          continue;
        }
        const long plane = image * sizes.channels + group * inputs + input;
        const double factor =
            w[((channel * inputs + input) * sizes.kernel_height + y) * sizes.kernel_width + z];
        sum += factor * x[(plane * sizes.height + from_row) * sizes.width + from_column];
      }
    }
  }
  return sum;
}

enum class Kind { kGathered, kPointwise, kDepthwise, kFewPixels };

template <ConvolutionSizes sizes, Kind kind, Ending ending>
void run_convolution(const float* x, const float* w, Terms terms, float* out) {
  constexpr long depth = sizes.channels / sizes.groups * sizes.kernel_height * sizes.kernel_width;
  constexpr long pixels = sizes.out_height * sizes.out_width;
  using Images = PaddedImages<sizes>;
  if constexpr (kind == Kind::kPointwise) {
    PointwiseConvolution<sizes, ending>::run(x, w, terms, out);
  } else if constexpr (kind == Kind::kFewPixels) {
    using Few = ConvolutionOfFewPixels<sizes, Order::kColumns, depth, ending>;
    const auto rows = numbers(sizes.images * pixels * (depth + sizes.out_channels));
    Few::run(x, w, terms, out, rows.get());
  } else {
    const auto padded = numbers(sizes.images * sizes.channels * Images::kPlane + Images::kSlack);
    using Made = std::conditional_t<kind == Kind::kDepthwise, DepthwiseConvolution<sizes, ending>,
                                    Convolution<sizes, ending>>;
    Made::run(x, w, terms, out, padded.get());
  }
}

// For a channel: a bias; where the epilogue is scaled, a batch norm after it.
struct Channels {
  explicit Channels(long count)
      : bias(numbers(count)),
        weight(numbers(count)),
        shift(numbers(count)),
        mean(numbers(count)),
        variance(numbers(count)) {
    for (long at = 0; at < count; ++at) {
      float& of_channel = variance[static_cast<std::size_t>(at)];
      of_channel = std::abs(of_channel);
    }
  }

  double normed(double value, long channel) const {
    const auto at = static_cast<std::size_t>(channel);
    const double spread = std::sqrt(static_cast<double>(variance[at]) + kEpsilon);
    return (value - mean[at]) / spread * weight[at] + shift[at];
  }

  std::unique_ptr<float[]> bias, weight, shift, mean, variance;
};

template <ConvolutionSizes sizes, Kind kind, Ending ending>
void check_ending() {
  constexpr long inputs = sizes.channels / sizes.groups;
  constexpr long taps = sizes.kernel_height * sizes.kernel_width;
  constexpr long pixels = sizes.out_height * sizes.out_width;
  constexpr long count = sizes.images * sizes.out_channels * pixels;
  const auto x = numbers(sizes.images * sizes.channels * sizes.height * sizes.width);
  const auto w = numbers(sizes.out_channels * inputs * taps);
  const auto added = numbers(count), out = numbers(count);
  const Channels channels(sizes.out_channels);
  const auto made = numbers(2 * sizes.out_channels);
  Terms terms{channels.bias.get()};
  if constexpr (ending.is_scaled) {
    terms = offload::kernels::norm_terms<sizes.out_channels>(
        channels.bias.get(), channels.weight.get(), channels.shift.get(), channels.mean.get(),
        channels.variance.get(), kEpsilon, made.get());
  }
  terms.added = ending.has_added ? added.get() : nullptr;
  run_convolution<sizes, kind, ending>(x.get(), w.get(), terms, out.get());
  bool holds = true;
  for (long at = 0; at < count; ++at) {
    const long channel = at / pixels % sizes.out_channels;
    double value = expected_at(sizes, x.get(), w.get(), at / (sizes.out_channels * pixels), channel,
                               at % pixels / sizes.out_width, at % sizes.out_width);
    value += channels.bias[static_cast<std::size_t>(channel)];
    const double before = value;
    if (ending.is_scaled) value = channels.normed(value, channel);
    const double scaled = before == 0 ? 1 : std::abs(value / before);
    if (ending.has_added) value += added[static_cast<std::size_t>(at)];
    const double expected = value < 0 ? 0 : value;
    holds = holds && std::abs(out[static_cast<std::size_t>(at)] - expected) <=
                         1e-4 * (1 + scaled + expected);
  }
  CHECK_THAT(holds);
}

template <ConvolutionSizes sizes, Kind kind>
void check_convolution() {
  constexpr Ending biased{Activation::kRelu, true}, normed{Activation::kRelu, true, true};
  check_ending<sizes, kind, biased>();
  check_ending<sizes, kind, normed>();
  if constexpr (kind == Kind::kGathered || kind == Kind::kPointwise) {
    check_ending<sizes, kind, Ending{Activation::kRelu, true, false, true}>();
    check_ending<sizes, kind, Ending{Activation::kRelu, true, true, true}>();
  }
}

// The largest number under a window in the order of torch's kernel; of several NaNs the last.
float largest_at(const PoolSizes& sizes, const float* plane, long out_row, long out_column) {
  float found = -std::numeric_limits<float>::infinity();
  for (long y = 0; y < sizes.kernel_height; ++y) {
    for (long z = 0; z < sizes.kernel_width; ++z) {
      const long row =
          out_row * sizes.stride_height - sizes.padding_height + y * sizes.dilation_height;
      const long column =
          out_column * sizes.stride_width - sizes.padding_width + z * sizes.dilation_width;
      if (row < 0 || row >= sizes.height || column < 0 || column >= sizes.width) continue;
      const float value = plane[row * sizes.width + column];
      if (value > found || std::isnan(value)) found = value;
    }
  }
  return found;
}

template <PoolSizes sizes>
void check_pooling() {
  const long count = sizes.planes * sizes.height * sizes.width;
  const long area = sizes.out_height * sizes.out_width;
  const auto x = numbers(count);
  for (const float special :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::infinity()}) {
    for (long at = special > 0 ? 3 : 1; at < count; at += 29)
      x[static_cast<std::size_t>(at)] = special;
  }
  const auto out = numbers(sizes.planes * area);
  MaxPool<sizes>::run(x.get(), out.get());
  bool holds = true;
  for (long at = 0; at < sizes.planes * area; ++at) {
    const float* const plane = x.get() + at / area * sizes.height * sizes.width;
    const float expected =
        largest_at(sizes, plane, at % area / sizes.out_width, at % sizes.out_width);
    const float found = out[static_cast<std::size_t>(at)];
    holds = holds && (std::isnan(expected) ? std::isnan(found) : found == expected);
  }
  CHECK_THAT(holds);
}

}  // namespace

int main() {
  // Planes, height, width; those of the result; kernel, stride, padding, dilation.
  check_pooling<{3, 32, 32, 16, 16, 3, 3, 2, 2, 1, 1, 1, 1}>();
  check_pooling<{2, 17, 5, 17, 5, 3, 3, 1, 1, 1, 1, 1, 1}>();
  check_pooling<{2, 20, 33, 10, 17, 2, 2, 2, 2, 0, 0, 1, 1}>();
  check_pooling<{1, 9, 40, 3, 13, 4, 5, 2, 3, 1, 2, 1, 1}>();
  check_pooling<{1, 30, 70, 9, 62, 2, 3, 3, 1, 0, 0, 3, 4}>();
  check_pooling<{5, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1}>();
  // Images, channels, height, width; channels, height, width of the result; kernel, stride,
  // padding, dilation; groups.
  check_convolution<{2, 3, 9, 11, 8, 9, 11, 3, 3, 1, 1, 1, 1, 1, 1, 1}, Kind::kGathered>();
  check_convolution<{1, 3, 17, 16, 13, 9, 8, 3, 3, 2, 2, 1, 1, 1, 1, 1}, Kind::kGathered>();
  check_convolution<{1, 4, 12, 13, 6, 4, 3, 2, 5, 3, 4, 0, 1, 1, 1, 2}, Kind::kGathered>();
  check_convolution<{1, 60, 4, 4, 5, 4, 4, 3, 3, 1, 1, 2, 2, 2, 2, 1}, Kind::kGathered>();
  check_convolution<{2, 4, 1, 50, 6, 1, 48, 1, 3, 1, 1, 0, 0, 1, 1, 1}, Kind::kGathered>();
  check_convolution<{2, 5, 7, 7, 7, 7, 7, 1, 1, 1, 1, 0, 0, 1, 1, 1}, Kind::kPointwise>();
  check_convolution<{1, 6, 3, 33, 26, 3, 33, 1, 1, 1, 1, 0, 0, 1, 1, 2}, Kind::kPointwise>();
  check_convolution<{1, 9, 2, 2, 9, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1, 9}, Kind::kDepthwise>();
  check_convolution<{2, 3, 9, 20, 6, 5, 10, 3, 3, 2, 2, 1, 1, 1, 1, 3}, Kind::kDepthwise>();
  check_convolution<{1, 2, 70, 70, 2, 70, 70, 5, 3, 1, 1, 2, 2, 1, 2, 2}, Kind::kDepthwise>();
  check_convolution<{1, 2, 1, 9001, 2, 1, 9001, 1, 3, 1, 1, 0, 1, 1, 1, 2}, Kind::kDepthwise>();
  check_convolution<{1, 1, 2, 9999, 1, 2, 4999, 1, 3, 1, 2, 0, 0, 1, 1, 1}, Kind::kDepthwise>();
  check_convolution<{1, 33, 2, 2, 20, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1}, Kind::kFewPixels>();
  check_convolution<{3, 4, 5, 6, 7, 2, 3, 2, 2, 2, 2, 0, 0, 2, 1, 1}, Kind::kFewPixels>();
  return offload::test::result();
}
