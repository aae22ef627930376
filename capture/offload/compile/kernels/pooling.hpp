// Max pooling: the largest number under each window position, in planes of sizes known at compile
// time.
#pragma once

#include <limits>

#include "threads.hpp"
#include "vector.hpp"

namespace offload::kernels {

// Planes are contiguous. A window may extend beyond its plane and the padding.
struct PoolSizes {
  long planes, height, width;
  long out_height, out_width;
  long kernel_height, kernel_width;
  long stride_height, stride_width;
  long padding_height, padding_width;
  long dilation_height, dilation_width;
};

// As torch's operator: a NaN under the window is the result, and padding is less than any number.
template <PoolSizes sizes>
struct MaxPool {
  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  static void run(const float* x, float* out) {
    constexpr long area = sizes.out_height * sizes.out_width;
    constexpr long work = sizes.planes * area * sizes.kernel_height * sizes.kernel_width;
    for_each<sizes.planes, work>(
        [=](long item) { plane(x + item * sizes.height * sizes.width, out + item * area); });
  }

 private:
  static constexpr float kLowest = -std::numeric_limits<float>::infinity();
  // Numbers of a padded row, as far as vectors of the last windows reach.
  static constexpr long kReach = (sizes.out_width + kLanes - 1) * sizes.stride_width +
                                 (sizes.kernel_width - 1) * sizes.dilation_width + 2 * kLanes;
  static constexpr long kPadded = sizes.padding_width + sizes.width;
  static constexpr long kCount = ((kReach > kPadded ? kReach : kPadded) + 15) / 16 * 16;
  // At most 64 KiB are on the stack.
  static constexpr long kMost = 64 * 1024 / (sizeof(float) * kCount);
  static constexpr long kRowsAtOnce = kMost < 8 ? kMost : 8;
  static_assert(kRowsAtOnce > 0);

  [[gnu::always_inline]] static Vector largest(Vector so_far, Vector next) {
    return (next > so_far) | (next != next) ? next : so_far;
  }

  // Several rows at once: a vector that was just stored cannot be loaded at another offset without
  // a stall.
  static void plane(const float* x, float* out) {
    alignas(64) float rows[kRowsAtOnce * kCount];
    for (long at = 0; at < kRowsAtOnce * kCount; at += kLanes) store(rows + at, splat(kLowest));
    for (long first = 0; first < sizes.out_height; first += kRowsAtOnce) {
      const long rest = sizes.out_height - first;
      const long count = rest < kRowsAtOnce ? rest : kRowsAtOnce;
      for (long at = 0; at < count; ++at) {
        const long top = (first + at) * sizes.stride_height - sizes.padding_height;
        of_columns(x, top, rows + at * kCount + sizes.padding_width);
      }
      for (long at = 0; at < count; ++at) {
        of_rows(rows + at * kCount, out + (first + at) * sizes.out_width);
      }
    }
  }

  // The largest number of each column under windows whose first row is `top`.
  static void of_columns(const float* x, long top, float* row) {
    constexpr long whole = sizes.width / kLanes * kLanes;
    for (long at = 0; at < whole; at += kLanes) column<kLanes>(x + at, top, row + at);
    if constexpr (whole < sizes.width) column<sizes.width - whole>(x + whole, top, row + whole);
  }

  template <int count>
  [[gnu::always_inline]] static void column(const float* x, long top, float* row) {
    Vector found = splat(kLowest);
#pragma GCC unroll 4
    for (long tap = 0; tap < sizes.kernel_height; ++tap) {
      const long from = top + tap * sizes.dilation_height;
      if (from < 0 || from >= sizes.height) continue;
      found = largest(found, load_first<count>(x + from * sizes.width));
    }
    store_first<count>(row, found);
  }

  // The largest numbers of the windows along a row.
  static void of_rows(const float* row, float* out) {
    constexpr long whole = sizes.out_width / kLanes * kLanes;
    for (long at = 0; at < whole; at += kLanes) window<kLanes>(row, at, out);
    if constexpr (whole < sizes.out_width) window<sizes.out_width - whole>(row, whole, out);
  }

  template <int count>
  [[gnu::always_inline]] static void window(const float* row, long at, float* out) {
    Vector found = splat(kLowest);
#pragma GCC unroll 4
    for (long tap = 0; tap < sizes.kernel_width; ++tap) {
      found = largest(found, strided(row + at * sizes.stride_width + tap * sizes.dilation_width));
    }
    store_first<count>(out + at, found);
  }

  [[gnu::always_inline]] static Vector strided(const float* from) {
    if constexpr (sizes.stride_width == 1) return load(from);
    if constexpr (sizes.stride_width == 2) return every_other(load(from), load(from + kLanes));
    Vector found;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) found[lane] = from[lane * sizes.stride_width];
    return found;
  }
};

}  // namespace offload::kernels
