// Layouts of matrices, and panels, which are fast to multiply with.
#pragma once

#include <cstring>

#include "bfloat16.hpp"

namespace offload::kernels {

// The layout of a matrix of K rows and N columns: whether the elements of a column or those of a
// row are contiguous; or panels, as `pack` makes them.
enum class Order { kColumns, kRows, kPacked };

// A panel is rows of a few columns, one after another. In bfloat16 two rows are interleaved: the
// two numbers of a column are adjacent, and an odd last row is followed by zeros.
inline constexpr long kPanelColumns = 32;

// The numbers of a panel.
template <class Element>
constexpr long panel_size(long depth) {
  return kPanelColumns * (sizeof(Element) == sizeof(float) ? depth : (depth + 1) / 2 * 2);
}

namespace detail {

template <int distance, std::size_t... lanes>
[[gnu::always_inline]] inline void exchange(Vector (&rows)[kLanes], std::index_sequence<lanes...>) {
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
  if constexpr (distance > 1) exchange<distance / 2>(rows, std::index_sequence<lanes...>());
}

// Transposes as many rows as a vector has lanes, by exchanging halves, quarters and so on: of
// floats, or of pairs in bfloat16.
template <long stride, class Element>
[[gnu::always_inline]] inline void transpose_square(const Element* from, Element* to) {
  constexpr long in_lane = sizeof(float) / sizeof(Element);
  Vector rows[kLanes];
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(&rows[lane], from + lane * stride, sizeof rows[lane]);
  }
  exchange<kLanes / 2>(rows, std::make_index_sequence<kLanes>());
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(to + lane * kPanelColumns * in_lane, &rows[lane], sizeof rows[lane]);
  }
}

// Interleaves two rows of `columns` columns as one row of pairs.
template <int columns>
[[gnu::always_inline]] inline void interleave(const BFloat16* even, const BFloat16* odd,
                                              BFloat16* to) {
  Words pairs = load_first_halves<columns>(even);
  if (odd != nullptr) pairs |= load_first_halves<columns>(odd) << 16;
  std::memcpy(to, &pairs, sizeof pairs);
}

}  // namespace detail

// Copies columns of a matrix, of `depth` elements each, to a panel. `stride` is from one column to
// the next if a column is contiguous (kColumns), else from one row to the next. The rest of the
// panel is unchanged.
template <Order order, long stride, long columns>
[[gnu::noinline]] void copy_panel(const float* w, long depth, float* to) {
  if constexpr (order == Order::kRows) {
    for (long k = 0; k < depth; ++k) {
      std::memcpy(to + k * kPanelColumns, w + k * stride, columns * sizeof(float));
    }
    return;
  }
  constexpr long whole_columns = columns / kLanes * kLanes;
  const long whole_depth = depth / kLanes * kLanes;
  for (long n = 0; n < whole_columns; n += kLanes) {
    for (long k = 0; k < whole_depth; k += kLanes) {
      detail::transpose_square<stride>(w + n * stride + k, to + k * kPanelColumns + n);
    }
  }
  for (long n = 0; n < columns; ++n) {
    for (long k = n < whole_columns ? whole_depth : 0; k < depth; ++k) {
      to[k * kPanelColumns + n] = w[n * stride + k];
    }
  }
}

// The same in bfloat16. Vectors of the panel that have some of its columns are whole, with zeros.
template <Order order, long stride, long columns>
[[gnu::noinline]] void copy_panel(const BFloat16* w, long depth, BFloat16* to) {
  constexpr long row = 2 * kPanelColumns;
  constexpr long whole_columns = columns / kLanes * kLanes;
  if constexpr (order == Order::kRows) {
    for (long k = 0; k < depth; k += 2) {
      const BFloat16* const even = w + k * stride;
      const BFloat16* const odd = k + 1 < depth ? even + stride : nullptr;
      BFloat16* const pairs = to + k / 2 * row;
      for (long n = 0; n < whole_columns; n += kLanes) {
        detail::interleave<kLanes>(even + n, odd == nullptr ? odd : odd + n, pairs + 2 * n);
      }
      if constexpr (whole_columns < columns) {
        detail::interleave<columns - whole_columns>(even + whole_columns,
                                                    odd == nullptr ? odd : odd + whole_columns,
                                                    pairs + 2 * whole_columns);
      }
    }
    return;
  }
  const long whole_depth = depth / (2 * kLanes) * (2 * kLanes);
  for (long n = 0; n < whole_columns; n += kLanes) {
    for (long k = 0; k < whole_depth; k += 2 * kLanes) {
      detail::transpose_square<stride>(w + n * stride + k, to + k / 2 * row + 2 * n);
    }
  }
  for (long k = 0; k < depth; k += 2) {
    constexpr long filled = (columns + kLanes - 1) / kLanes * kLanes;
    for (long n = k < whole_depth ? whole_columns : 0; n < filled; ++n) {
      const BFloat16* const from = w + n * stride + k;
      BFloat16* const pair = to + k / 2 * row + 2 * n;
      pair[0] = n < columns ? from[0] : BFloat16{};
      pair[1] = n < columns && k + 1 < depth ? from[1] : BFloat16{};
    }
  }
}

// Copies a whole matrix to panels, the last one with zeros behind its columns.
template <long n_size, long k_size, Order order, long stride, class Element>
void pack(const Element* w, Element* to) {
  constexpr long step = order == Order::kColumns ? stride : 1;
  constexpr long whole = n_size / kPanelColumns * kPanelColumns;
  constexpr long size = panel_size<Element>(k_size);
  for (long n = 0; n < whole; n += kPanelColumns) {
    copy_panel<order, stride, kPanelColumns>(w + n * step, k_size, to + n / kPanelColumns * size);
  }
  if constexpr (whole < n_size) {
    Element* const last = to + whole / kPanelColumns * size;
    std::memset(last, 0, size * sizeof(Element));
    copy_panel<order, stride, n_size - whole>(w + whole * step, k_size, last);
  }
}

}  // namespace offload::kernels
