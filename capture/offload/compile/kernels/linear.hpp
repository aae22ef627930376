// Matrix products with sizes known at compile time, with bias and activation.
#pragma once

#include "ending.hpp"
#include "panels.hpp"
#include "threads.hpp"

namespace offload::kernels {

// Sizes and strides in elements: out[m, n] = ending of (sum over k of x[m, k] w[k, n]). Its
// channels are the columns, or else the rows; an added tensor has the layout of `out`.
template <long m_size, long n_size, long k_size, long x_stride, Order order, long w_stride,
          long out_stride, Ending ending, bool channels_are_rows = false>
struct Linear {
  static_assert(channels_are_rows || !ending.has_added);
  static constexpr long kMostRows = kLanes == 16 ? 12 : 6;
  static constexpr long kStrip = (kLanes == 4 ? 4 : 2) * kLanes;  // columns with sums in registers
  static constexpr long kRowsAtOnce = 8;  // of w, where they are read in the order of memory
  static constexpr long kDepth = 384;     // of a panel at a time: 48 KiB, near the processor
  static constexpr bool kIsCopied =
      order == Order::kColumns || (order == Order::kRows && m_size > kMostRows);

  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  static void run(const float* x, const float* w, Terms terms, float* out) {
    constexpr long n_items = (n_size + kColumnsAtOnce - 1) / kColumnsAtOnce;
    // With few rows, reading the matrix dominates.
    constexpr long work = n_size * k_size * (m_size < 4 ? 4 : m_size);
    for_each<n_items, work>([=](long item) {
      const long n = item * kColumnsAtOnce;
      if (n + kColumnsAtOnce <= n_size) {
        part<kColumnsAtOnce>(x, w + n * kColumnStep, of_columns(terms, n), out + n);
      } else if constexpr (n_size % kColumnsAtOnce != 0) {
        part<n_size % kColumnsAtOnce>(x, w + n * kColumnStep, of_columns(terms, n), out + n);
      }
    });
  }

  // Adds a block of depth of some columns, whose rows of w are in order: as panels, or w_stride
  // apart. If not first, it continues the sums in out.
  template <long columns>
  static void strips(const float* x, const float* w, Terms terms, float* out, long depth,
                     bool is_first, bool is_last) {
    constexpr long whole = columns / kStrip * kStrip;
    for (long n = 0; n < whole; n += kStrip) {
      blocks_of_rows<kStrip>(x, w + n, of_columns(terms, n), out + n, depth, is_first, is_last);
    }
    if constexpr (whole < columns) {
      blocks_of_rows<columns - whole>(x, w + whole, of_columns(terms, whole), out + whole, depth,
                                      is_first, is_last);
    }
  }

 private:
  static Terms of_columns(Terms terms, long n) {
    return moved<ending>(terms, channels_are_rows ? 0 : n, n);
  }

  static Terms of_rows(Terms terms, long m) {
    return moved<ending>(terms, channels_are_rows ? m : 0, m * out_stride);
  }

  // How the matrix is read: packed or many rows: by panels; few rows: in the order of memory.
  static constexpr bool kIsSwept = order == Order::kRows && m_size < 4 && !channels_are_rows;
  static constexpr bool kIsDotted = order == Order::kColumns && m_size < 4;
  // At least 4 KiB of a row of w, so that it is read sequentially.
  static constexpr long kColumnsAtOnce = kIsSwept ? 1024 : kIsDotted ? kLanes : kPanelColumns;
  static constexpr long kColumnStep =
      order == Order::kRows ? 1 : (order == Order::kColumns ? w_stride : k_size);

  // Computes `columns` columns of the result.
  template <long columns>
  static void part(const float* x, const float* w, Terms terms, float* out) {
    if constexpr (kIsDotted) {
      for (long m = 0; m < m_size; ++m) {
        dots<static_cast<int>(columns)>(x + m * x_stride, w, terms, out + m * out_stride);
      }
    } else if constexpr (kIsSwept) {
      by_rows<columns>(x, w, terms, out);
    } else {
      panel<columns>(x, w, terms, out);
    }
  }

  // Blocks of rows of about the same height.
  static constexpr long kBlocks = (m_size + kMostRows - 1) / kMostRows;
  static constexpr long kHeight = m_size / kBlocks;
  static constexpr long kTaller = m_size % kBlocks;  // blocks with one more row
  // The step from one row of K to the next, where a tile reads them, and in w.
  static constexpr long kRowStep = order == Order::kRows && !kIsCopied ? w_stride : kPanelColumns;
  static constexpr long kDepthStep =
      order == Order::kRows ? w_stride : (order == Order::kColumns ? 1 : kPanelColumns);

  // The sums of blocks of depth are added up in out: the error grows with their number and their
  // depth, and not with the product of both.
  template <long columns>
  static void panel(const float* x, const float* w, Terms terms, float* out) {
    for (long k = 0; k < k_size; k += kDepth) {
      const long depth = k_size - k < kDepth ? k_size - k : kDepth;
      const float* const from = w + k * kDepthStep;
      if constexpr (kIsCopied) {
        alignas(64) float rows[kDepth * kPanelColumns];
        copy_panel<order, w_stride, columns>(from, depth, rows);
        strips<columns>(x + k, rows, terms, out, depth, k == 0, k + depth == k_size);
      } else {
        strips<columns>(x + k, from, terms, out, depth, k == 0, k + depth == k_size);
      }
    }
  }

  template <long columns>
  static void blocks_of_rows(const float* x, const float* w, Terms terms, float* out, long depth,
                             bool is_first, bool is_last) {
    long m = 0;
    if constexpr (kTaller > 0) {
      for (; m < kTaller * (kHeight + 1); m += kHeight + 1) {
        tile<kHeight + 1, columns>(x + m * x_stride, w, of_rows(terms, m), out + m * out_stride,
                                   depth, is_first, is_last);
      }
    }
    for (; m < m_size; m += kHeight) {
      tile<kHeight, columns>(x + m * x_stride, w, of_rows(terms, m), out + m * out_stride, depth,
                             is_first, is_last);
    }
  }

  // Finishes the sums of a block of depth, for `count` lanes at the beginning of the terms. A bias
  // without a scale is added first, as in a dot product.
  template <int count>
  [[gnu::always_inline]] static Vector ended(Vector value, Terms terms, bool is_first,
                                             bool is_last) {
    const auto of_channels = [](const float* from) __attribute__((always_inline)) {
      return channels_are_rows ? splat(*from) : load_first<count>(from);
    };
    if constexpr (ending.has_bias && !ending.is_scaled) {
      if (is_first) value += of_channels(terms.bias);
    }
    if (!is_last) return value;
    if constexpr (ending.is_scaled) {
      value = value * of_channels(terms.scale) + of_channels(terms.bias);
    }
    if constexpr (ending.has_added) value += load_first<count>(terms.added);
    return activated<ending.activation>(value);
  }

  // Packed panels are read in order. While one is multiplied with many rows, the next one is
  // prefetched: otherwise it would arrive too late. With few rows reading dominates, and never
  // pauses.
  static constexpr long kPanelBytes = panel_size<float>(k_size) * sizeof(float);

  // If not first, continues the sums in out. Packed rows are whole: their zeros are read.
  template <long rows, long columns>
  [[gnu::noinline]] static void tile(const float* x, const float* w, Terms terms, float* out,
                                     long depth, bool is_first, bool is_last) {
    constexpr long vectors = (columns + kLanes - 1) / kLanes;
    constexpr int tail = columns % kLanes == 0 ? kLanes : static_cast<int>(columns % kLanes);
    constexpr int read = order == Order::kPacked ? kLanes : tail;
    // Each addition waits for the one before it: if sums are few, each is split into several, of
    // every other k and so on.
    constexpr long splits = rows * vectors >= 12 ? 1 : (rows * vectors >= 6 ? 2 : 4);
    Vector sums[splits][rows][vectors] = {};
    const auto add = [=](Vector(&to)[rows][vectors], long k) __attribute__((always_inline)) {
      if constexpr (order == Order::kPacked && splits == 1) {
        prefetch<vectors * sizeof(Vector)>(w + k * kRowStep, kPanelBytes);
      }
      Vector row[vectors];
#pragma GCC unroll 8
      for (long v = 0; v < vectors; ++v) {
        const float* const from = w + k * kRowStep + v * kLanes;
        row[v] = v + 1 < vectors ? load(from) : load_first<read>(from);
        if constexpr (rows > 1) keep(row[v]);
      }
#pragma GCC unroll 16
      for (long m = 0; m < rows; ++m) {
        const Vector factor = splat(x[m * x_stride + k]);
#pragma GCC unroll 8
        for (long v = 0; v < vectors; ++v) to[m][v] += factor * row[v];
      }
    };
    long k = 0;
    for (; k + splits <= depth; k += splits) {
#pragma GCC unroll 4
      for (long split = 0; split < splits; ++split) add(sums[split], k + split);
    }
    if constexpr (splits > 1) {
      for (; k < depth; ++k) add(sums[0], k);
    }
#pragma GCC unroll 16
    for (long m = 0; m < rows; ++m) {
#pragma GCC unroll 8
      for (long v = 0; v < vectors; ++v) {
        float* const to = out + m * out_stride + v * kLanes;
        Vector value = sums[0][m][v];
#pragma GCC unroll 4
        for (long split = 1; split < splits; ++split) value += sums[split][m][v];
        if (!is_first) value += v + 1 < vectors ? load(to) : load_first<tail>(to);
        const Terms its = of_columns(of_rows(terms, m), v * kLanes);
        value = v + 1 < vectors ? ended<kLanes>(value, its, is_first, is_last)
                                : ended<tail>(value, its, is_first, is_last);
        if (v + 1 < vectors) {
          store(to, value);
        } else {
          store_first<tail>(to, value);
        }
      }
    }
  }

  // ---- few rows of x with rows of w, in the order of memory -------------------------------------

  template <long columns>
  static void by_rows(const float* x, const float* w, Terms terms, float* out) {
    constexpr long whole = k_size / kRowsAtOnce * kRowsAtOnce;
    for (long k = 0; k < whole; k += kRowsAtOnce) {
      sweep<kRowsAtOnce, columns>(x + k, w + k * w_stride, terms, out, k == 0,
                                  k + kRowsAtOnce == k_size);
    }
    if constexpr (whole < k_size) {
      sweep<k_size - whole, columns>(x + whole, w + whole * w_stride, terms, out, whole == 0, true);
    }
  }

  template <long rows, long columns>
  [[gnu::noinline]] static void sweep(const float* x, const float* w, Terms terms, float* out,
                                      bool is_first, bool is_last) {
    Vector factors[m_size][rows];
    for (long m = 0; m < m_size; ++m) {
      for (long row = 0; row < rows; ++row) factors[m][row] = splat(x[m * x_stride + row]);
    }
    constexpr long whole = columns / kLanes * kLanes;
    for (long n = 0; n < whole; n += kLanes) {
      add_rows<rows, kLanes>(factors, w + n, of_columns(terms, n), out + n, is_first, is_last);
    }
    if constexpr (whole < columns) {
      add_rows<rows, columns - whole>(factors, w + whole, of_columns(terms, whole), out + whole,
                                      is_first, is_last);
    }
  }

  template <long rows, int columns>
  [[gnu::always_inline]] static void add_rows(const Vector (&factors)[m_size][rows], const float* w,
                                              Terms terms, float* out, bool is_first,
                                              bool is_last) {
    Vector sum[m_size] = {};
#pragma GCC unroll 16
    for (long row = 0; row < rows; ++row) {
      const Vector values = load_first<columns>(w + row * w_stride);
#pragma GCC unroll 4
      for (long m = 0; m < m_size; ++m) sum[m] += factors[m][row] * values;
    }
#pragma GCC unroll 4
    for (long m = 0; m < m_size; ++m) {
      float* const to = out + m * out_stride;
      if (!is_first) sum[m] += load_first<columns>(to);
      store_first<columns>(to, ended<columns>(sum[m], terms, is_first, is_last));
    }
  }

  // ---- a row of x with columns of w, as many at once as a vector has lanes ----------------------

  template <int columns>
  [[gnu::noinline]] static void dots(const float* x, const float* w, Terms terms, float* out) {
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
    store_first<columns>(out, ended<columns>(sums_of(sum), terms, true, true));
  }
};

}  // namespace offload::kernels
