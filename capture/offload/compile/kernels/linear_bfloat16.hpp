// Matrix products in bfloat16 with sizes known at compile time: summed in float32, rounded once.
#pragma once

#include <type_traits>

#include "linear.hpp"

namespace offload::kernels {

// As Linear, with x, w and bias in bfloat16, and out in bfloat16 or in float32.
template <class Result, long m_size, long n_size, long k_size, long x_stride, Order order,
          long w_stride, long out_stride, Ending ending>
struct LinearBFloat16 {
  static_assert(!ending.is_scaled && !ending.has_added);
  static constexpr long kMostRows = kLanes == 16 ? 12 : 6;
  static constexpr long kStrip = (kLanes == 4 ? 4 : 2) * kLanes;  // columns with sums in registers
  static constexpr long kDepth = 768;     // of a panel at a time: 48 KiB, near the processor
  static constexpr long kRowsAtOnce = 8;  // of w, where they are read in the order of memory

  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  static void run(const BFloat16* x, const BFloat16* w, const BFloat16* bias, Result* out) {
    constexpr long n_items = (n_size + kColumnsAtOnce - 1) / kColumnsAtOnce;
    // With few rows, reading the matrix dominates.
    constexpr long work = n_size * k_size * (m_size < 4 ? 4 : m_size);
    for_each<n_items, work>([=](long item) {
      const long n = item * kColumnsAtOnce;
      const BFloat16* const from = w + item * kItemStep;
      if (n + kColumnsAtOnce <= n_size) {
        part<kColumnsAtOnce>(x, from, bias + n, out + n);
      } else if constexpr (n_size % kColumnsAtOnce != 0) {
        part<n_size % kColumnsAtOnce>(x, from, bias + n, out + n);
      }
    });
  }

 private:
  // How the matrix is read: packed or many rows: by panels; few rows: in the order of memory.
  static constexpr bool kIsSwept = order == Order::kRows && m_size < 4;
  static constexpr bool kIsDotted = order == Order::kColumns && m_size < 4;
  static constexpr bool kIsCopied = order != Order::kPacked;
  static constexpr long kColumnsAtOnce = kIsSwept ? 1024 : kIsDotted ? kLanes : kPanelColumns;
  static constexpr long kItemStep =
      order == Order::kPacked ? panel_size<BFloat16>(k_size)
                              : kColumnsAtOnce * (order == Order::kColumns ? w_stride : 1);

  // Computes `columns` columns of the result.
  template <long columns>
  static void part(const BFloat16* x, const BFloat16* w, const BFloat16* bias, Result* out) {
    if constexpr (kIsDotted) {
      for (long m = 0; m < m_size; ++m) {
        dots<static_cast<int>(columns)>(x + m * x_stride, w, bias, out + m * out_stride);
      }
    } else if constexpr (kIsSwept) {
      by_rows<columns>(x, w, bias, out);
    } else {
      constexpr long whole = m_size / kRowsOfPanel * kRowsOfPanel;
      for (long m = 0; m < whole; m += kRowsOfPanel) {
        panel<kRowsOfPanel, columns>(x + m * x_stride, w, bias, out + m * out_stride);
      }
      if constexpr (whole < m_size) {
        panel<m_size - whole, columns>(x + whole * x_stride, w, bias, out + whole * out_stride);
      }
    }
  }

  // ---- by panels --------------------------------------------------------------------------------

  // Sums of a deep product are kept in separate memory between blocks of depth: those of at most
  // 144 rows, 18 KiB. Rows are divided evenly, in whole tiles.
  static constexpr long kMostSums = k_size > kDepth ? 144 : m_size;
  static constexpr long kShares = (m_size + kMostSums - 1) / kMostSums;
  static constexpr long kTilesOfShare =
      ((m_size + kShares - 1) / kShares + kMostRows - 1) / kMostRows;
  static constexpr long kRowsOfPanel =
      kTilesOfShare * kMostRows < m_size ? kTilesOfShare * kMostRows : m_size;
  static constexpr long kDepthStep =
      order == Order::kRows ? w_stride : (order == Order::kColumns ? 1 : kPanelColumns);

  struct Block {
    long depth;
    bool is_first, is_last;
  };

  // Null if a single block of depth is the whole product.
  static float* sums_from(float* sums, long offset) {
    if constexpr (k_size > kDepth) return sums + offset;
    return nullptr;
  }

  template <long rows, long columns>
  static void panel(const BFloat16* x, const BFloat16* w, const BFloat16* bias, Result* out) {
    alignas(64) float sums[k_size > kDepth ? rows * kPanelColumns : 1];
    for (long k = 0; k < k_size; k += kDepth) {
      const long depth = k_size - k < kDepth ? k_size - k : kDepth;
      const Block block{depth, k == 0, k + depth == k_size};
      const BFloat16* const from = w + k * kDepthStep;
      if constexpr (kIsCopied) {
        constexpr long deepest = k_size < kDepth ? k_size : kDepth;
        alignas(64) BFloat16 pairs[panel_size<BFloat16>(deepest)];
        copy_panel<order, w_stride, columns>(from, depth, pairs);
        blocks_of_rows<rows, columns>(x + k, pairs, bias, sums, out, block);
      } else {
        blocks_of_rows<rows, columns>(x + k, from, bias, sums, out, block);
      }
    }
  }

  // Blocks of about the same height.
  template <long rows, long columns>
  static void blocks_of_rows(const BFloat16* x, const BFloat16* w, const BFloat16* bias,
                             float* sums, Result* out, const Block& block) {
    constexpr long n_blocks = (rows + kMostRows - 1) / kMostRows;
    constexpr long height = rows / n_blocks;
    constexpr long taller = rows % n_blocks;  // blocks with one more row
    long m = 0;
    if constexpr (taller > 0) {
      for (; m < taller * (height + 1); m += height + 1) {
        strips<height + 1, columns>(x + m * x_stride, w, bias, sums_from(sums, m * kPanelColumns),
                                    out + m * out_stride, block);
      }
    }
    for (; m < rows; m += height) {
      strips<height, columns>(x + m * x_stride, w, bias, sums_from(sums, m * kPanelColumns),
                              out + m * out_stride, block);
    }
  }

  template <long rows, long columns>
  static void strips(const BFloat16* x, const BFloat16* w, const BFloat16* bias, float* sums,
                     Result* out, const Block& block) {
    if constexpr (std::is_same_v<Factor, BFloat16>) {
      strips_of<rows, columns, x_stride>(x, w, bias, sums, out, block);
    } else {
      constexpr long stride = k_size < kDepth ? k_size : kDepth;
      alignas(64) float factors[rows * stride];
      for (long m = 0; m < rows; ++m) widen(x + m * x_stride, block.depth, factors + m * stride);
      strips_of<rows, columns, stride>(factors, w, bias, sums, out, block);
    }
  }

  static void widen(const BFloat16* from, long count, float* to) {
    long at = 0;
    if constexpr (k_size >= kLanes) {
      for (; at + kLanes <= count; at += kLanes) store(to + at, load(from + at));
    }
    constexpr int rest = k_size % kLanes;  // of the last block of depth
    if constexpr (rest > 0) {
      if (at < count) store_first<rest>(to + at, load_first<rest>(from + at));
    }
  }

  template <long rows, long columns, long stride>
  static void strips_of(const Factor* x, const BFloat16* w, const BFloat16* bias, float* sums,
                        Result* out, const Block& block) {
    constexpr long whole = columns / kStrip * kStrip;
    for (long n = 0; n < whole; n += kStrip) {
      tile<rows, kStrip, stride>(x, w + 2 * n, bias + n, sums_from(sums, n), out + n, block);
    }
    if constexpr (whole < columns) {
      tile<rows, columns - whole, stride>(x, w + 2 * whole, bias + whole, sums_from(sums, whole),
                                          out + whole, block);
    }
  }

  // Packed panels are read in order. While one is multiplied with many rows, the next one is
  // prefetched: otherwise it would arrive too late. With few rows reading dominates, and never
  // pauses.
  static constexpr long kPanelBytes = panel_size<BFloat16>(k_size) * sizeof(BFloat16);

  // Two interleaved rows of w times a pair of each row of x. Pairs of a panel fill whole vectors.
  template <bool is_prefetching, long stride, long rows, long vectors, class PairOf>
  [[gnu::always_inline]] static void add_pair(const Factor* x, const BFloat16* w,
                                              const PairOf& pair_of,
                                              Vector (&sums)[rows][vectors]) {
    if constexpr (order == Order::kPacked && is_prefetching) {
      prefetch<vectors * sizeof(Vector)>(w, kPanelBytes);
    }
    Pairs row[vectors];
#pragma GCC unroll 8
    for (long v = 0; v < vectors; ++v) {
      row[v] = load_pairs(w + v * 2 * kLanes);
      if constexpr (rows > 1) keep(row[v]);
    }
#pragma GCC unroll 16
    for (long m = 0; m < rows; ++m) {
      const Pairs factor = pair_of(x + m * stride);
#pragma GCC unroll 8
      for (long v = 0; v < vectors; ++v) sums[m][v] = add_products(sums[m][v], factor, row[v]);
    }
  }

  // If not first, continues sums.
  template <long rows, long columns, long stride>
  [[gnu::noinline]] static void tile(const Factor* x, const BFloat16* w, const BFloat16* bias,
                                     float* sums, Result* out, Block block) {
    constexpr long vectors = (columns + kLanes - 1) / kLanes;
    // Each addition waits for the one before it: if sums are few, each is split into several, of
    // every other pair and so on.
    constexpr long splits = rows * vectors >= 12 ? 1 : (rows * vectors >= 6 ? 2 : 4);
    Vector found[splits][rows][vectors] = {};
    long k = 0;
    for (; k + 2 * splits <= block.depth; k += 2 * splits) {
#pragma GCC unroll 4
      for (long split = 0; split < splits; ++split) {
        const long at = k + 2 * split;
        add_pair<splits == 1, stride>(x + at, w + at * kPanelColumns, splat_pair, found[split]);
      }
    }
    if constexpr (splits > 1) {
      for (; k + 2 <= block.depth; k += 2) {
        add_pair<false, stride>(x + k, w + k * kPanelColumns, splat_pair, found[0]);
      }
    }
    if (k < block.depth) {
      add_pair<false, stride>(x + k, w + k * kPanelColumns, splat_first, found[0]);
    }
#pragma GCC unroll 16
    for (long m = 0; m < rows; ++m) {
#pragma GCC unroll 4
      for (long split = 1; split < splits; ++split) {
#pragma GCC unroll 8
        for (long v = 0; v < vectors; ++v) found[0][m][v] += found[split][m][v];
      }
      finish<columns>(found[0][m], bias, sums_from(sums, m * kPanelColumns), out + m * out_stride,
                      block);
    }
  }

  // Finishes a row of a tile.
  template <long columns>
  [[gnu::always_inline]] static void finish(const Vector (&found)[(columns + kLanes - 1) / kLanes],
                                            const BFloat16* bias, float* sums, Result* out,
                                            Block block) {
    constexpr long vectors = (columns + kLanes - 1) / kLanes;
    constexpr int tail = columns % kLanes == 0 ? kLanes : static_cast<int>(columns % kLanes);
#pragma GCC unroll 8
    for (long v = 0; v < vectors; ++v) {
      const long n = v * kLanes;
      Vector value = found[v];
      if constexpr (ending.has_bias) {
        if (block.is_first) value += v + 1 < vectors ? load(bias + n) : load_first<tail>(bias + n);
      }
      if constexpr (k_size > kDepth) {
        if (!block.is_first) value += load(sums + n);
        if (!block.is_last) {
          store(sums + n, value);
          continue;
        }
      }
      value = activated<ending.activation>(value);
      if (v + 1 < vectors) {
        store(out + n, value);
      } else {
        store_first<tail>(out + n, value);
      }
    }
  }

  // ---- few rows of x with rows of w, in the order of memory -------------------------------------

  template <long columns>
  static void by_rows(const BFloat16* x, const BFloat16* w, const BFloat16* bias, Result* out) {
    constexpr long vectors = (columns + kLanes - 1) / kLanes;
    constexpr int tail = columns % kLanes == 0 ? kLanes : static_cast<int>(columns % kLanes);
    constexpr long whole = k_size / kRowsAtOnce * kRowsAtOnce;
    Vector sums[vectors][m_size] = {};
    for (long k = 0; k < whole; k += kRowsAtOnce) {
      sweep<kRowsAtOnce, columns>(x + k, w + k * w_stride, sums);
    }
    if constexpr (whole < k_size) {
      sweep<k_size - whole, columns>(x + whole, w + whole * w_stride, sums);
    }
    constexpr Block block{k_size, true, true};
    for (long m = 0; m < m_size; ++m) {
      Result* const to = out + m * out_stride;
      for (long v = 0; v + 1 < vectors; ++v) {
        finish<kLanes>({sums[v][m]}, bias + v * kLanes, nullptr, to + v * kLanes, block);
      }
      constexpr long last = (vectors - 1) * kLanes;
      finish<tail>({sums[vectors - 1][m]}, bias + last, nullptr, to + last, block);
    }
  }

  template <long rows, long columns>
  [[gnu::noinline]] static void sweep(const BFloat16* x, const BFloat16* w,
                                      Vector (*sums)[m_size]) {
    Vector factors[m_size][rows];
    for (long m = 0; m < m_size; ++m) {
      for (long row = 0; row < rows; ++row) {
        factors[m][row] = splat(load_first<1>(x + m * x_stride + row)[0]);
      }
    }
    constexpr long whole = columns / kLanes * kLanes;
    for (long n = 0; n < whole; n += kLanes) {
      add_rows<rows, kLanes>(factors, w + n, sums[n / kLanes]);
    }
    if constexpr (whole < columns) {
      add_rows<rows, columns - whole>(factors, w + whole, sums[whole / kLanes]);
    }
  }

  template <long rows, int columns>
  [[gnu::always_inline]] static void add_rows(const Vector (&factors)[m_size][rows],
                                              const BFloat16* w, Vector (&sums)[m_size]) {
#pragma GCC unroll 16
    for (long row = 0; row < rows; ++row) {
      const Vector values = load_first<columns>(w + row * w_stride);
#pragma GCC unroll 4
      for (long m = 0; m < m_size; ++m) sums[m] += factors[m][row] * values;
    }
  }

  // ---- a row of x with columns of w, as many at once as a vector has lanes ----------------------

  template <int columns>
  [[gnu::noinline]] static void dots(const BFloat16* x, const BFloat16* w, const BFloat16* bias,
                                     Result* out) {
    constexpr long step = 2 * kLanes;
    constexpr long whole = k_size / step * step;
    Vector sum[kLanes] = {};
    for (long k = 0; k < whole; k += step) {
      const Pairs factor = load_pairs(x + k);
#pragma GCC unroll 16
      for (int n = 0; n < columns; ++n) {
        sum[n] = add_products(sum[n], factor, load_pairs(w + n * w_stride + k));
      }
    }
    if constexpr (whole < k_size) {
      constexpr int rest = static_cast<int>(k_size - whole);
      const Pairs factor = load_first_pairs<rest>(x + whole);
#pragma GCC unroll 16
      for (int n = 0; n < columns; ++n) {
        const Pairs column = load_first_pairs<rest>(w + n * w_stride + whole);
        sum[n] = add_products(sum[n], factor, column);
      }
    }
    finish<columns>({sums_of(sum)}, bias, nullptr, out, Block{k_size, true, true});
  }
};

// A matrix product of Element, added up in floats, as Result.
template <class Element, class Result, long m_size, long n_size, long k_size, long x_stride,
          Order order, long w_stride, long out_stride>
using Product = std::conditional_t<
    std::is_same_v<Element, float>,
    Linear<m_size, n_size, k_size, x_stride, order, w_stride, out_stride, Ending{}>,
    LinearBFloat16<Result, m_size, n_size, k_size, x_stride, order, w_stride, out_stride,
                   Ending{}>>;

}  // namespace offload::kernels
