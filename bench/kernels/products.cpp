// Speed of products with weights in place and packed, from the caches and from memory.
//
//   g++ -std=c++20 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=fast \
//       -fno-tree-loop-vectorize -I capture/offload/compile/kernels bench/kernels/products.cpp \
//       -o products && ./products
//
// One line for each size: medians in microseconds of one thread. Weights are cycled through a
// number of MiB, so that they come from the caches or from memory: as columns and as rows in place,
// and as panels; and the same in bfloat16.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear_bfloat16.hpp"

namespace {

using namespace offload::kernels;

constexpr int kRounds = 21;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

template <class Call>
double median_us(int n_calls, const Call& call) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int at = 0; at < n_calls; ++at) call(at);
    const std::chrono::duration<double, std::micro> passed =
        std::chrono::steady_clock::now() - begin;
    times.push_back(passed.count() / n_calls);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

// In huge pages where the system provides them, as an executable keeps panels.
template <class Element>
Element* numbers(std::size_t count) {
  const std::size_t size_bytes =
      (count * sizeof(Element) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  auto* const begin = static_cast<Element*>(std::aligned_alloc(kHugePageBytes, size_bytes));
  if (begin == nullptr) std::abort();
  madvise(begin, size_bytes, MADV_HUGEPAGE);
  Element value;
  store_first<1>(&value, splat(0.25f));
  std::fill_n(begin, count, value);
  return begin;
}

template <class Element, long m, long k, long n, Order order>
double product_us(std::size_t cycled_bytes) {
  constexpr long stride = order == Order::kColumns ? k : n;
  constexpr Ending kBiased{.has_bias = true};
  using Product =
      std::conditional_t<std::is_same_v<Element, float>,
                         Linear<m, n, k, k, order, stride, n, kBiased>,
                         LinearBFloat16<Element, m, n, k, k, order, stride, n, kBiased>>;
  constexpr std::size_t one = (n + kPanelColumns - 1) / kPanelColumns * panel_size<Element>(k);
  const auto copies = std::max<std::size_t>(1, cycled_bytes / (one * sizeof(Element)));
  Element* const w = numbers<Element>(one * copies);
  Element half, whole;
  store_first<1>(&half, splat(0.5f));
  store_first<1>(&whole, splat(1.0f));
  const std::vector<Element> x(m * k, half), bias(n, whole);
  std::vector<Element> out(m * n);
  const double us = median_us(static_cast<int>(copies), [&](int at) {
    Product::run(x.data(), w + one * static_cast<std::size_t>(at), {bias.data()}, out.data());
    asm volatile("" : : "r"(out.data()) : "memory");
  });
  std::free(w);
  return us;
}

template <class Element, long m, long k, long n>
void measure_of(const char* element, std::size_t cycled_bytes) {
  const double columns = product_us<Element, m, k, n, Order::kColumns>(cycled_bytes);
  const double rows = product_us<Element, m, k, n, Order::kRows>(cycled_bytes);
  const double packed = product_us<Element, m, k, n, Order::kPacked>(cycled_bytes);
  std::printf("%4ld x %4ld x %4ld %s  columns %9.2f  rows %9.2f  packed %9.2f us %6.0f GFLOP/s\n",
              m, k, n, element, columns, rows, packed, 2e-3 * m * n * k / packed);
}

template <long m, long k, long n>
void measure(std::size_t cycled_bytes) {
  measure_of<float, m, k, n>("float32 ", cycled_bytes);
  measure_of<BFloat16, m, k, n>("bfloat16", cycled_bytes);
}

void measure_all(std::size_t cycled_bytes) {
  std::printf("weights through %zu MiB\n", cycled_bytes >> 20);
  measure<1, 64, 64>(cycled_bytes);
  measure<1, 384, 1536>(cycled_bytes);
  measure<1, 768, 3072>(cycled_bytes);
  measure<2, 384, 384>(cycled_bytes);
  measure<4, 384, 1536>(cycled_bytes);
  measure<9, 384, 384>(cycled_bytes);
  measure<9, 1536, 384>(cycled_bytes);
  measure<16, 64, 192>(cycled_bytes);
  measure<32, 384, 384>(cycled_bytes);
  measure<32, 384, 1536>(cycled_bytes);
  measure<64, 384, 1536>(cycled_bytes);
  measure<128, 384, 1536>(cycled_bytes);
  measure<128, 3072, 768>(cycled_bytes);
}

}  // namespace

int main() {
  measure_all(std::size_t{8} << 20);
  measure_all(std::size_t{64} << 20);
}
