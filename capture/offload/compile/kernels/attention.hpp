// Attention with sizes known at compile time: softmax(scale q k^T + mask) v, by batch and head.
#pragma once

#include "linear_bfloat16.hpp"

namespace offload::kernels {

// Strides in elements, by batch, head and token; those of a mask by batch, head, row and column.
struct Strides {
  long batch, head, token;
};
struct MaskStrides {
  long batch, head, row, column;
};

// q is [batch, heads, rows, width], k [batch, heads / group, columns, width], v likewise of
// value_width, out as q of value_width. A causal row sees the columns up to its own index. Scores
// are floats; in bfloat16 their weights are rounded, as in torch's kernel.
template <class Element, class MaskElement, long batches, long heads, long group, long rows,
          long columns, long width, long value_width, Strides q_strides, Strides k_strides,
          Strides v_strides, Strides out_strides, bool is_causal, bool has_mask,
          MaskStrides mask_strides>
struct Attention {
  // Rows of scores on the stack: at most 64 KiB. Keys and values are copied as panels for each
  // block of rows.
  static constexpr long kMostRows = columns <= 256 ? 64 : (columns <= 1024 ? 16 : 4);
  static constexpr long kRows = rows < kMostRows ? rows : kMostRows;
  static_assert(columns <= 4096);
  static constexpr long kScoreStride = (columns + kLanes - 1) / kLanes * kLanes;
  static constexpr long kWeightStride = kScoreStride * (sizeof(float) / sizeof(Element));

  static void run(const Element* q, const Element* k, const Element* v, const MaskElement* mask,
                  Element* out, float scale) {
    constexpr long n_blocks = (rows + kRows - 1) / kRows;
    constexpr long work = batches * heads * rows * columns * (width + value_width);
    for_each<batches * heads * n_blocks, work>([=](long item) {
      const long batch = item / (heads * n_blocks);
      const long head = item / n_blocks % heads;
      const long row = item % n_blocks * kRows;
      const Element* const keys = k + batch * k_strides.batch + head / group * k_strides.head;
      const Element* const values = v + batch * v_strides.batch + head / group * v_strides.head;
      const MaskElement* const added =
          has_mask ? mask + batch * mask_strides.batch + head * mask_strides.head : nullptr;
      const Element* const asked = q + batch * q_strides.batch + head * q_strides.head;
      Element* const made = out + batch * out_strides.batch + head * out_strides.head;
      if (row + kRows <= rows) {
        block<kRows>(asked, keys, values, added, made, scale, row);
      } else if constexpr (rows % kRows != 0) {
        block<rows % kRows>(asked, keys, values, added, made, scale, row);
      }
    });
  }

 private:
  template <long count>
  static void block(const Element* q, const Element* k, const Element* v, const MaskElement* mask,
                    Element* out, float scale, long first) {
    using Scores = Product<Element, float, count, columns, width, q_strides.token, Order::kColumns,
                           k_strides.token, kScoreStride>;
    using Values = Product<Element, Element, count, value_width, columns, kWeightStride,
                           Order::kRows, v_strides.token, out_strides.token>;
    alignas(64) float scores[count * kScoreStride];
    Scores::run(q + first * q_strides.token, k, {}, scores);
    for (long row = 0; row < count; ++row) {
      const MaskElement* const added = has_mask ? mask + (first + row) * mask_strides.row : nullptr;
      normalize(scores + row * kScoreStride, added, scale, first + row);
    }
    // A row of weights overwrites its scores.
    Values::run(reinterpret_cast<const Element*>(scores), v, {}, out + first * out_strides.token);
  }

  // Turns a row of scores into weights. A row that sees no column becomes zero, as in torch's
  // kernel.
  static void normalize(float* scores, const MaskElement* mask, float scale, long row) {
    constexpr float kNothing = -__builtin_inff();
    const long seen = is_causal && row + 1 < columns ? row + 1 : columns;
    Vector largest = splat(kNothing);
    for (long at = 0; at < kScoreStride; at += kLanes) {
      Vector value = load(scores + at) * scale;
      if constexpr (has_mask) value += masked(mask, at);
      if (at + kLanes > seen) {
        for (int lane = 0; lane < kLanes; ++lane) {
          if (at + lane >= seen) value[lane] = kNothing;
        }
      }
      largest = larger(value, largest);
      store(scores + at, value);
    }
    const float most = largest_of(largest);
    const float shift = most == kNothing ? 0.0f : most;
    Vector sums{};
    for (long at = 0; at < kScoreStride; at += kLanes) {
      const Vector score = load(scores + at);
      const Vector value = score == kNothing ? Vector{} : exponential(score - shift);
      sums += value;
      store(scores + at, value);
    }
    const float sum = sum_of(sums);
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    Element* const weights = reinterpret_cast<Element*>(scores);
    for (long at = 0; at < kScoreStride; at += kLanes) {
      store(weights + at, load(scores + at) * factor);
    }
  }

  static Vector masked(const MaskElement* mask, long at) {
    Vector value{};
    if constexpr (mask_strides.column == 1) {
      if (at + kLanes <= columns) return load(mask + at);
      if constexpr (columns % kLanes != 0) return load_first<columns % kLanes>(mask + at);
      return value;
    }
    for (int lane = 0; lane < kLanes && at + lane < columns; ++lane) {
      value[lane] = load_first<1>(mask + (at + lane) * mask_strides.column)[0];
    }
    return value;
  }
};

}  // namespace offload::kernels
