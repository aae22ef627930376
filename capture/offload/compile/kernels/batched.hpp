// Products of many pairs of matrices.
#pragma once

#include "linear_bfloat16.hpp"

namespace offload::kernels {

// Multiplies each of `batches` pairs by One, which has no bias. Steps are in elements, from one
// matrix to the next; work counts the multiply-adds of all pairs together.
template <class One, long batches, long x_step, long w_step, long out_step, long work>
struct Batched {
  // Divides work among torch's threads if it is large enough. Their number does not affect the
  // result.
  template <class Element>
  static void run(const Element* x, const Element* w, Element* out) {
    for_each<batches, work>([=](long batch) {
      One::run(x + batch * x_step, w + batch * w_step, {}, out + batch * out_step);
    });
  }
};

}  // namespace offload::kernels
