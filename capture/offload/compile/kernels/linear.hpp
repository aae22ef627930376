// Products of matrices whose sizes are known, with bias and activation.
#pragma once

#include "vector.hpp"

namespace offload::kernels {

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid };

// As torch's operators: NaN stays NaN.
template <Activation activation>
[[gnu::always_inline]] inline Vector activated(Vector x) {
  if constexpr (activation == Activation::kRelu) {
    return x < 0.0f ? Vector{} : x;
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

// How a matrix of K rows and N columns lies: whether the elements of a column or those of a row lie
// side by side.
enum class Order { kColumns, kRows };

// Sizes and strides in elements: out[m, n] = activation(bias[n] + sum over k of x[m, k] w[k, n]).
template <long m_size, long n_size, long k_size, long x_stride, Order order, long w_stride,
          long out_stride, Activation activation, bool has_bias>
struct Linear {
  static constexpr long kRowsAtOnce = 8;
  static constexpr long kVectorsAtOnce = kLanes == 16 ? 3 : (kLanes == 8 ? 1 : 2);
  static constexpr long kPanel = kVectorsAtOnce * kLanes;  // columns
  static constexpr long kDepth = 256;  // of a panel that is transposed: 48 KiB of the stack

  static void run(const float* x, const float* w, const float* bias, float* out) {
    if constexpr (order == Order::kColumns && m_size < 4) {
      for (long m = 0; m < m_size; ++m) by_dots(x + m * x_stride, w, bias, out + m * out_stride);
    } else {
      panels(x, w, bias, out);
    }
  }

 private:
  // Lanes of the last vector of a row of N columns.
  static constexpr int tail_of(long columns) {
    return columns % kLanes == 0 ? kLanes : static_cast<int>(columns % kLanes);
  }

  // ---- a panel of columns at a time, of which rows lie side by side or are made to --------------

  static void panels(const float* x, const float* w, const float* bias, float* out) {
    constexpr long step = order == Order::kRows ? 1 : w_stride;
    constexpr long whole = n_size / kPanel * kPanel;
    for (long n = 0; n < whole; n += kPanel) {
      blocks_of_depth<kPanel>(x, w + n * step, bias + n, out + n);
    }
    if constexpr (whole < n_size) {
      blocks_of_depth<n_size - whole>(x, w + whole * step, bias + whole, out + whole);
    }
  }

  // The sums of blocks are added up in out: the error grows with their number and their depth, and
  // not with the product of both.
  template <long columns>
  static void blocks_of_depth(const float* x, const float* w, const float* bias, float* out) {
    constexpr long step = order == Order::kRows ? w_stride : 1;
    constexpr long n_blocks = (k_size + kDepth - 1) / kDepth;
    constexpr long last = k_size - (n_blocks - 1) * kDepth;
    if constexpr (n_blocks == 1) {
      block<last, columns, true, true>(x, w, bias, out);
    } else {
      block<kDepth, columns, true, false>(x, w, bias, out);
      for (long k = kDepth; k < k_size - last; k += kDepth) {
        block<kDepth, columns, false, false>(x + k, w + k * step, bias, out);
      }
      block<last, columns, false, true>(x + k_size - last, w + (k_size - last) * step, bias, out);
    }
  }

  template <long depth, long columns, bool is_first, bool is_last>
  static void block(const float* x, const float* w, const float* bias, float* out) {
    if constexpr (order == Order::kRows) {
      panel<depth, w_stride, columns, is_first, is_last>(x, w, bias, out);
    } else {
      alignas(64) float rows[depth * kPanel];
      transpose<depth, columns>(w, rows);
      panel<depth, kPanel, columns, is_first, is_last>(x, rows, bias, out);
    }
  }

  // All rows of x against `columns` of w. What is not first continues sums that lie in out.
  template <long depth, long stride, long columns, bool is_first, bool is_last>
  static void panel(const float* x, const float* w, const float* bias, float* out) {
    constexpr long whole = m_size / kRowsAtOnce * kRowsAtOnce;
    for (long m = 0; m < whole; m += kRowsAtOnce) {
      tile<kRowsAtOnce, depth, stride, columns, is_first, is_last>(x + m * x_stride, w, bias,
                                                                   out + m * out_stride);
    }
    if constexpr (whole < m_size) {
      tile<m_size - whole, depth, stride, columns, is_first, is_last>(x + whole * x_stride, w, bias,
                                                                      out + whole * out_stride);
    }
  }

  template <long rows, long depth, long stride, long columns, bool is_first, bool is_last>
  [[gnu::noinline]] static void tile(const float* x, const float* w, const float* bias,
                                     float* out) {
    constexpr long vectors = (columns + kLanes - 1) / kLanes;
    constexpr int tail = tail_of(columns);
    Vector sum[rows][vectors] = {};
    for (long k = 0; k < depth; ++k) {
      Vector row[vectors];
#pragma GCC unroll 8
      for (long v = 0; v < vectors; ++v) {
        const float* const from = w + k * stride + v * kLanes;
        row[v] = v + 1 < vectors ? load(from) : load_first<tail>(from);
      }
#pragma GCC unroll 16
      for (long m = 0; m < rows; ++m) {
        const Vector factor = splat(x[m * x_stride + k]);
#pragma GCC unroll 8
        for (long v = 0; v < vectors; ++v) sum[m][v] += factor * row[v];
      }
    }
#pragma GCC unroll 16
    for (long m = 0; m < rows; ++m) {
#pragma GCC unroll 8
      for (long v = 0; v < vectors; ++v) {
        float* const to = out + m * out_stride + v * kLanes;
        const float* const from = is_first ? bias + v * kLanes : to;
        Vector value = sum[m][v];
        if (!is_first || has_bias) value += v + 1 < vectors ? load(from) : load_first<tail>(from);
        if (is_last) value = activated<activation>(value);
        if (v + 1 < vectors) {
          store(to, value);
        } else {
          store_first<tail>(to, value);
        }
      }
    }
  }

  // ---- columns of w that lie side by side, as rows ----------------------------------------------

  template <long depth, long columns>
  [[gnu::noinline]] static void transpose(const float* w, float* to) {
    constexpr long whole_columns = columns / kLanes * kLanes;
    constexpr long whole_depth = depth / kLanes * kLanes;
    for (long n = 0; n < whole_columns; n += kLanes) {
      for (long k = 0; k < whole_depth; k += kLanes) {
        transpose_square(w + n * w_stride + k, to + k * kPanel + n);
      }
    }
    for (long n = 0; n < columns; ++n) {
      for (long k = n < whole_columns ? whole_depth : 0; k < depth; ++k) {
        to[k * kPanel + n] = w[n * w_stride + k];
      }
    }
  }

  // As many rows as a vector has lanes, by exchanging halves, quarters and so on.
  [[gnu::always_inline]] static void transpose_square(const float* w, float* to) {
    Vector rows[kLanes];
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) rows[lane] = load(w + lane * w_stride);
    exchange<kLanes / 2>(rows);
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) store(to + lane * kPanel, rows[lane]);
  }

  template <int distance>
  [[gnu::always_inline]] static void exchange(Vector (&rows)[kLanes]) {
    exchange_at<distance>(rows, std::make_index_sequence<kLanes>());
    if constexpr (distance > 1) exchange<distance / 2>(rows);
  }

  template <int distance, std::size_t... lanes>
  [[gnu::always_inline]] static void exchange_at(Vector (&rows)[kLanes],
                                                 std::index_sequence<lanes...>) {
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) {
      if (lane & distance) continue;
      const Vector one = rows[lane];
      const Vector other = rows[lane + distance];
      rows[lane] = __builtin_shufflevector(
          one, other, (lanes & distance ? (lanes ^ distance) + kLanes : lanes)...);
      rows[lane + distance] = __builtin_shufflevector(
          one, other, (lanes & distance ? lanes + kLanes : lanes ^ distance)...);
    }
  }

  // ---- a row of x against columns of w, as many at once as a vector has lanes ------------------

  static void by_dots(const float* x, const float* w, const float* bias, float* out) {
    constexpr long whole = n_size / kLanes * kLanes;
    for (long n = 0; n < whole; n += kLanes) dots<kLanes>(x, w + n * w_stride, bias + n, out + n);
    if constexpr (whole < n_size) {
      dots<static_cast<int>(n_size - whole)>(x, w + whole * w_stride, bias + whole, out + whole);
    }
  }

  template <int columns>
  [[gnu::always_inline]] static void dots(const float* x, const float* w, const float* bias,
                                          float* out) {
    constexpr long whole = k_size / kLanes * kLanes;
    Vector sum[kLanes] = {};
    for (long k = 0; k < whole; k += kLanes) {
      const Vector factor = load(x + k);
#pragma GCC unroll 16
      for (int n = 0; n < columns; ++n) sum[n] += factor * load(w + n * w_stride + k);
    }
    if constexpr (whole < k_size) {
      constexpr int rest = static_cast<int>(k_size - whole);
      const Vector factor = load_first<rest>(x + whole);
#pragma GCC unroll 16
      for (int n = 0; n < columns; ++n)
        sum[n] += factor * load_first<rest>(w + n * w_stride + whole);
    }
    Vector value = sums_of(sum);
    if constexpr (has_bias) value += load_first<columns>(bias);
    store_first<columns>(out, activated<activation>(value));
  }
};

}  // namespace offload::kernels
