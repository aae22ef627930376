// Operators that exchange the state of a random generator on the CPU with the bytes of a tensor.
//
// A training step in stages draws the same numbers on each rank: the first rank's launches give the
// state of its generator, messages carry it to the others, and their launches set it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

namespace offload {
namespace {

at::Generator generator_or_default(const std::optional<at::Generator>& given) {
  return given ? *given : at::detail::getDefaultCPUGenerator();
}

// Writes the state into a contiguous uint8 tensor. Throws c10::Error where the sizes differ.
void get_generator_state(at::Tensor& state, std::optional<at::Generator> generator) {
  at::Generator found = generator_or_default(generator);
  const std::scoped_lock lock(found.mutex());
  state.copy_(found.get_state());
}

// Sets the state to the content of a contiguous uint8 tensor. Throws c10::Error where it is none.
//
// The tensor is copied: `CPUGeneratorImpl::set_state` (torch 2.13) adds the offset of a tensor in
// its storage twice, and reads beyond it.
void set_generator_state(const at::Tensor& state, std::optional<at::Generator> generator) {
  at::Generator found = generator_or_default(generator);
  const std::scoped_lock lock(found.mutex());
  found.set_state(state.clone());
}

}  // namespace
}  // namespace offload

TORCH_LIBRARY(offload, library) {
  library.def("get_generator_state(Tensor(a!) state, *, Generator? generator=None) -> ()");
  library.def("set_generator_state(Tensor state, *, Generator? generator=None) -> ()");
}

TORCH_LIBRARY_IMPL(offload, CPU, library) {
  library.impl("get_generator_state", &offload::get_generator_state);
  library.impl("set_generator_state", &offload::set_generator_state);
}
