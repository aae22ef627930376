// Two-dimensional convolutions with sizes known at compile time, with endings by output channel.
#pragma once

#include "linear.hpp"

namespace offload::kernels {

// Sizes of a convolution. Images, weights and results are contiguous in the order [images,
// channels, height, width] and [out_channels, channels / groups, kernel_height, kernel_width].
struct ConvolutionSizes {
  long images, channels, height, width;
  long out_channels, out_height, out_width;
  long kernel_height, kernel_width;
  long stride_height, stride_width;
  long padding_height, padding_width;
  long dilation_height, dilation_width;
  long groups;
};

// Images with zeros around them. Readers may read some numbers beyond the last one.
template <ConvolutionSizes sizes>
struct PaddedImages {
  static constexpr long kHeight = sizes.height + 2 * sizes.padding_height;
  static constexpr long kWidth = sizes.width + 2 * sizes.padding_width;
  static constexpr long kPlane = kHeight * kWidth;
  static constexpr long kSlack = 2 * kLanes;

  // `padded` is memory for all images and the slack, in floats.
  static void make(const float* x, float* padded) {
    for_each<sizes.images * sizes.channels, sizes.images * sizes.channels * kPlane>(
        [=](long channel) {
          const float* const from = x + channel * sizes.height * sizes.width;
          float* const to = padded + channel * kPlane;
          constexpr long above = sizes.padding_height * kWidth;
          std::memset(to, 0, above * sizeof(float));
          for (long row = 0; row < sizes.height; ++row) {
            float* const begin = to + above + row * kWidth;
            std::memset(begin, 0, sizes.padding_width * sizeof(float));
            std::memcpy(begin + sizes.padding_width, from + row * sizes.width,
                        sizes.width * sizeof(float));
            std::memset(begin + sizes.padding_width + sizes.width, 0,
                        sizes.padding_width * sizeof(float));
          }
          std::memset(to + kPlane - above, 0, above * sizeof(float));
        });
    std::memset(padded + sizes.images * sizes.channels * kPlane, 0, kSlack * sizeof(float));
  }
};

// The result of a group is the product of its weights, one row per output channel, with the inputs
// of its pixels, one column each. Panels of 32 such columns are gathered from padded images into
// memory near the processor.
template <ConvolutionSizes sizes, Ending ending>
struct Convolution {
  using Images = PaddedImages<sizes>;
  static constexpr long kPixels = sizes.out_height * sizes.out_width;
  static constexpr long kGroupChannels = sizes.channels / sizes.groups;
  static constexpr long kGroupRows = sizes.out_channels / sizes.groups;
  static constexpr long kTaps = sizes.kernel_height * sizes.kernel_width;
  static constexpr long kDepth = kGroupChannels * kTaps;

  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  static void run(const float* x, const float* w, Terms terms, float* out, float* padded) {
    Images::make(x, padded);
    constexpr long n_panels = (kPixels + kPanelColumns - 1) / kPanelColumns;
    constexpr long items = sizes.images * sizes.groups * n_panels;
    constexpr long work = sizes.images * kPixels * sizes.out_channels * kDepth;
    for_each<items, work>([=](long item) {
      const long image = item / (sizes.groups * n_panels);
      const long group = item / n_panels % sizes.groups;
      const long pixel = item % n_panels * kPanelColumns;
      const float* const from =
          padded + (image * sizes.channels + group * kGroupChannels) * Images::kPlane;
      const float* const weights = w + group * kGroupRows * kDepth;
      const long place = (image * sizes.out_channels + group * kGroupRows) * kPixels + pixel;
      const Terms its = moved<ending>(terms, group * kGroupRows, place);
      if (pixel + kPanelColumns <= kPixels) {
        panel<kPanelColumns>(from, pixel, weights, its, out + place);
      } else if constexpr (kPixels % kPanelColumns != 0) {
        panel<kPixels % kPanelColumns>(from, pixel, weights, its, out + place);
      }
    });
  }

 private:
  // Pixels of a panel in one row of the result: the first column of the panel, the offset of its
  // inputs from the panel's, and the number of pixels.
  struct Segment {
    long column, from, count;
  };

  // All panels have segments of the same size, one after another.
  static constexpr bool kIsRegular =
      kPanelColumns % sizes.out_width == 0 || sizes.out_width % kPanelColumns == 0;
  static constexpr long kRowStep = sizes.stride_height * Images::kWidth;

  template <long columns>
  static void panel(const float* images, long first, const float* w, Terms terms, float* out) {
    using Product = Linear<kGroupRows, columns, kDepth, kDepth, Order::kRows, kPanelColumns,
                           kPixels, ending, true>;
    images += first / sizes.out_width * kRowStep + first % sizes.out_width * sizes.stride_width;
    Segment segments[(columns - 1) / sizes.out_width + 2];
    const long n_segments = segments_of<columns>(first % sizes.out_width, segments);
    // Blocks consist of whole channels, unless these are deeper.
    constexpr bool is_by_channel = kTaps <= Product::kDepth;
    constexpr long most = is_by_channel ? Product::kDepth / kTaps * kTaps : Product::kDepth;
    // A row is written up to a vector beyond its end, where the next one follows.
    alignas(64) float rows[most * kPanelColumns + kLanes];
    for (long k = 0; k < kDepth; k += most) {
      const long depth = kDepth - k < most ? kDepth - k : most;
      if constexpr (is_by_channel) {
        for (long at = 0; at < depth; at += kTaps) {
          const float* const channel = images + (k + at) / kTaps * Images::kPlane;
#pragma GCC unroll 9
          for (long tap = 0; tap < kTaps; ++tap) {
            float* const to = rows + (at + tap) * kPanelColumns;
            gather<columns>(channel + place_of(tap), to, segments, n_segments);
          }
        }
      } else {
        for (long at = 0; at < depth; ++at) {
          const float* const from = images + (k + at) / kTaps * Images::kPlane;
          gather<columns>(from + place_of((k + at) % kTaps), rows + at * kPanelColumns, segments,
                          n_segments);
        }
      }
      Product::template strips<columns>(w + k, rows, terms, out, depth, k == 0,
                                        k + depth == kDepth);
    }
  }

  // Segments of a panel whose first pixel is at `place` in its row.
  template <long columns>
  static long segments_of(long place, Segment* segments) {
    long n_segments = 0, from = 0;
    for (long column = 0; column < columns; place = 0) {
      const long rest = columns - column;
      const long count = sizes.out_width - place < rest ? sizes.out_width - place : rest;
      segments[n_segments++] = {column, from, count};
      from += kRowStep - place * sizes.stride_width;
      column += count;
    }
    return n_segments;
  }

  // The offset of a tap's inputs in a channel.
  static constexpr long place_of(long tap) {
    return tap / sizes.kernel_width * sizes.dilation_height * Images::kWidth +
           tap % sizes.kernel_width * sizes.dilation_width;
  }

  template <long columns>
  [[gnu::always_inline]] static void gather(const float* from, float* to, const Segment* segments,
                                            long n_segments) {
    if constexpr (kIsRegular) {
      constexpr long count = sizes.out_width < columns ? sizes.out_width : columns;
#pragma GCC unroll 8
      for (long number = 0; number < columns / count; ++number) {
        copy(from + number * kRowStep, to + number * count, count);
      }
    } else {
      for (long number = 0; number < n_segments; ++number) {
        copy(from + segments[number].from, to + segments[number].column, segments[number].count);
      }
    }
  }

  [[gnu::always_inline]] static void copy(const float* from, float* to, long count) {
    if constexpr (sizes.stride_width == 1) {
      for (long at = 0; at < count; at += kLanes) store(to + at, load(from + at));
    } else if constexpr (sizes.stride_width == 2) {
      for (long at = 0; at < count; at += kLanes) {
        store(to + at, every_other(load(from + 2 * at), load(from + 2 * at + kLanes)));
      }
    } else {
      for (long at = 0; at < count; ++at) to[at] = from[at * sizes.stride_width];
    }
  }
};

// Each output channel depends on a single input channel: sums over its taps, for as many pixels at
// once as a vector has lanes. If no pixel is skipped, rows follow one another, with their padding
// between them.
template <ConvolutionSizes sizes, Ending ending>
struct DepthwiseConvolution {
  using Images = PaddedImages<sizes>;
  static constexpr long kPixels = sizes.out_height * sizes.out_width;
  static constexpr long kMultiplier = sizes.out_channels / sizes.channels;
  static constexpr long kTaps = sizes.kernel_height * sizes.kernel_width;
  static_assert(sizes.groups == sizes.channels && !ending.has_added);

  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  static void run(const float* x, const float* w, Terms terms, float* out, float* padded) {
    Images::make(x, padded);
    constexpr long items = sizes.images * sizes.out_channels;
    for_each<items, items * kPixels * kTaps>([=](long item) {
      const long channel = item % sizes.out_channels;
      const float* const from = padded + item / kMultiplier * Images::kPlane;
      plane(from, w + channel * kTaps, moved<ending>(terms, channel, 0), out + item * kPixels);
    });
  }

 private:
  static constexpr long kAllRows = (sizes.out_height - 1) * Images::kWidth + sizes.out_width;
  static constexpr bool kIsWhole =
      sizes.stride_height == 1 && sizes.stride_width == 1 && kAllRows <= 4096;
  // Results of a row that are made at once: as many as use about so much memory near the processor.
  static constexpr long kMost = 4096 / sizes.stride_width > 0 ? 4096 / sizes.stride_width : 1;
  static constexpr long kPiece = sizes.out_width < kMost ? sizes.out_width : kMost;
  static constexpr long kCount = kIsWhole ? kAllRows : (kPiece - 1) * sizes.stride_width + 1;

  static void plane(const float* from, const float* w, Terms terms, float* out) {
    alignas(64) float made[(kCount + kLanes - 1) / kLanes * kLanes];
    if constexpr (kIsWhole) {
      sums(from, w, terms, made);
      for (long row = 0; row < sizes.out_height; ++row) {
        std::memcpy(out + row * sizes.out_width, made + row * Images::kWidth,
                    sizes.out_width * sizeof(float));
      }
    } else {
      for (long row = 0; row < sizes.out_height; ++row) {
        for (long next = 0; next < sizes.out_width; next += kPiece) {
          const long last = sizes.out_width - kPiece;  // begins within the piece before it
          const long first = next < last ? next : last;
          sums(from + row * sizes.stride_height * Images::kWidth + first * sizes.stride_width, w,
               terms, made);
          for (long at = 0; at < kPiece; ++at) {
            out[row * sizes.out_width + first + at] = made[at * sizes.stride_width];
          }
        }
      }
    }
  }

  static void sums(const float* from, const float* w, Terms terms, float* made) {
    for (long at = 0; at < kCount; at += kLanes) {
      Vector sum = ending.has_bias && !ending.is_scaled ? splat(*terms.bias) : Vector{};
#pragma GCC unroll 9
      for (long tap = 0; tap < kTaps; ++tap) {
        const long distance = tap / sizes.kernel_width * sizes.dilation_height * Images::kWidth +
                              tap % sizes.kernel_width * sizes.dilation_width;
        sum += load(from + at + distance) * w[tap];
      }
      if constexpr (ending.is_scaled) sum = sum * splat(*terms.scale) + splat(*terms.bias);
      store(made + at, activated<ending.activation>(sum));
    }
  }
};

// For few pixels, where reading the weights dominates: the pixels' inputs are rows, multiplied with
// the weights as in a linear layer. `order` and `w_stride` describe these as a matrix with a column
// for each output channel.
template <ConvolutionSizes sizes, Order order, long w_stride, Ending ending>
struct ConvolutionOfFewPixels {
  static_assert(sizes.groups == 1);
  static constexpr long kPixels = sizes.out_height * sizes.out_width;
  static constexpr long kRows = sizes.images * kPixels;
  static constexpr long kTaps = sizes.kernel_height * sizes.kernel_width;
  static constexpr long kDepth = sizes.channels * kTaps;

  // `rows` is memory for kRows times kDepth + out_channels floats.
  static void run(const float* x, const float* w, Terms terms, float* out, float* rows) {
    using Product = Linear<kRows, sizes.out_channels, kDepth, kDepth, order, w_stride,
                           sizes.out_channels, ending>;
    for (long row = 0; row < kRows; ++row) gather(x, row, rows + row * kDepth);
    float* const made = rows + kRows * kDepth;
    Product::run(rows, w, terms, made);
    for (long image = 0; image < sizes.images; ++image) {
      for (long channel = 0; channel < sizes.out_channels; ++channel) {
        for (long pixel = 0; pixel < kPixels; ++pixel) {
          out[(image * sizes.out_channels + channel) * kPixels + pixel] =
              made[(image * kPixels + pixel) * sizes.out_channels + channel];
        }
      }
    }
  }

 private:
  static void gather(const float* x, long row, float* to) {
    const long image = row / kPixels;
    const long top = row % kPixels / sizes.out_width * sizes.stride_height - sizes.padding_height;
    const long left = row % sizes.out_width * sizes.stride_width - sizes.padding_width;
    for (long tap = 0; tap < kTaps; ++tap) {
      const long at_row = top + tap / sizes.kernel_width * sizes.dilation_height;
      const long at_column = left + tap % sizes.kernel_width * sizes.dilation_width;
      const bool is_inside =
          at_row >= 0 && at_row < sizes.height && at_column >= 0 && at_column < sizes.width;
      const float* const from =
          x + (image * sizes.channels * sizes.height + at_row) * sizes.width + at_column;
      for (long channel = 0; channel < sizes.channels; ++channel) {
        to[channel * kTaps + tap] = is_inside ? from[channel * sizes.height * sizes.width] : 0.0f;
      }
    }
  }
};

// A convolution of one tap without padding and strides: its columns are read from the images in
// place.
template <ConvolutionSizes sizes, Ending ending>
struct PointwiseConvolution {
  static constexpr long kPixels = sizes.height * sizes.width;
  static constexpr long kGroupChannels = sizes.channels / sizes.groups;
  static constexpr long kGroupRows = sizes.out_channels / sizes.groups;

  static void run(const float* x, const float* w, Terms terms, float* out) {
    using Product = Linear<kGroupRows, kPixels, kGroupChannels, kGroupChannels, Order::kRows,
                           kPixels, kPixels, ending, true>;
    constexpr long items = sizes.images * sizes.groups;
    for_each<items, items * kGroupRows * kPixels * kGroupChannels>([=](long item) {
      const long group = item % sizes.groups;
      Product::run(w + group * kGroupRows * kGroupChannels, x + item * kGroupChannels * kPixels,
                   moved<ending>(terms, group * kGroupRows, item * kGroupRows * kPixels),
                   out + item * kGroupRows * kPixels);
    });
  }
};

}  // namespace offload::kernels
