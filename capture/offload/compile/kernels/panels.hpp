// How matrices lie, and panels, which are quick to multiply with.
#pragma once

#include <cstring>

#include "vector.hpp"

namespace offload::kernels {

// How a matrix of K rows and N columns lies: whether the elements of a column or those of a row lie
// side by side; or as panels, which `pack` makes.
enum class Order { kColumns, kRows, kPacked };

// Of a panel: rows of a few columns, one behind the other.
inline constexpr long kPanelColumns = 32;

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

// As many rows as a vector has lanes become columns, by exchanging halves, quarters and so on.
template <long stride>
[[gnu::always_inline]] inline void transpose_square(const float* from, float* to) {
  Vector rows[kLanes];
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) rows[lane] = load(from + lane * stride);
  exchange<kLanes / 2>(rows, std::make_index_sequence<kLanes>());
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) store(to + lane * kPanelColumns, rows[lane]);
}

}  // namespace detail

// Columns of a matrix, of `depth` elements each, as a panel. `stride` is from one column to the
// next where these lie side by side (kColumns), else from one row to the next. The rest of the
// panel stays as it is.
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

// A whole matrix as panels, the last one with zeros behind its columns.
template <long n_size, long k_size, Order order, long stride>
void pack(const float* w, float* to) {
  constexpr long step = order == Order::kColumns ? stride : 1;
  constexpr long whole = n_size / kPanelColumns * kPanelColumns;
  for (long n = 0; n < whole; n += kPanelColumns) {
    copy_panel<order, stride, kPanelColumns>(w + n * step, k_size, to + n * k_size);
  }
  if constexpr (whole < n_size) {
    float* const last = to + whole * k_size;
    std::memset(last, 0, kPanelColumns * k_size * sizeof(float));
    copy_panel<order, stride, n_size - whole>(w + whole * step, k_size, last);
  }
}

}  // namespace offload::kernels
