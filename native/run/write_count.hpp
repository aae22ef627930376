// How often the tensors of a weight were written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace offload {

// The sum of the counts that torch keeps for autograd (`_version`; tensors that share memory as
// views share a count, those tied otherwise have separate ones). Writes through `param.data` or
// NumPy, by fused optimizers, or to tensors made in inference mode are not counted.
inline std::uint64_t write_count(const std::vector<at::Tensor>& tensors) noexcept {
  std::uint64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
    if (version.enabled()) sum += version.current_version();
  }
  return sum;
}

}  // namespace offload
