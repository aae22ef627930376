// Launches as Python describes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cpu/cpu_resident.hpp"

namespace offload {

// Stands in a launch's arguments for a tensor of the resident.
struct TensorIndex {
  std::size_t index;
};

// A launch, as recorded, of a resident whose tensors `tensor` gives. Other tensors among the
// arguments are given as they are. Throws std::invalid_argument for an operator that does not
// exist, or takes other arguments, and pybind11::type_error for an argument that does not fit.
CpuLaunch to_launch(const std::function<at::Tensor(std::size_t)>& tensor,
                    const std::string& operator_name, const std::string& overload,
                    const pybind11::tuple& arguments, std::vector<CpuMade> made,
                    std::vector<std::size_t> releases, pybind11::handle guard, bool guards_shape,
                    const std::string& source);

// Lets tensors of a resident require gradients, which composite operators look at; none are
// recorded. Throws std::out_of_range for a tensor that does not exist.
template <typename Launches>
void require_gradients(Launches& resident, const std::vector<std::size_t>& tensors) {
  for (const std::size_t index : tensors) resident.tensor(index).set_requires_grad(true);
}

}  // namespace offload
