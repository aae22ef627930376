// How often the tensors of a weight were written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace offload {

// By the count that torch keeps for autograd (`_version`, of tensors that share memory as views one
// for all; of those that are tied otherwise each has its own). Not counted is what is written
// through `param.data`, through NumPy, by fused optimizers, or to tensors that were made in
// inference mode.
inline std::uint64_t write_count(const std::vector<at::Tensor>& tensors) noexcept {
  std::uint64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
    if (version.enabled()) sum += version.current_version();
  }
  return sum;
}

}  // namespace offload
