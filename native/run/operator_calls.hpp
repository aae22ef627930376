// What residents that call torch's operators share: lookup, and checks of results and errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "run/call.hpp"

namespace offload {

// Throws std::invalid_argument for an operator that does not exist.
c10::OperatorHandle find_operator(const std::string& name, const std::string& overload);

// The tensors that an operator left on the stack, lists flattened; undefined for non-tensors.
std::vector<at::Tensor> tensors_on(const std::vector<c10::IValue>& stack);

// Throws for a result whose layout differs from the recorded one: BindingError if the recorded
// layout is a guard, CaptureError for the right shape in another layout, otherwise ExecutionError.
// `launch` describes the launch.
void check_result(const at::Tensor& result, const TensorLayout& layout, std::int64_t offset_bytes,
                  bool guards_shape, const std::string& launch);

// Throws BindingError for a number that was read on the host and differs from the recorded one.
void check_guard(const c10::IValue& found, const c10::IValue& recorded, const std::string& source,
                 const std::string& operator_name);

// Called in the handler of a launch's error: rethrows it as ExecutionError, or OutOfMemory if the
// allocator of the CPU or of a device has no memory, naming the launch. offload's own errors that
// name it propagate unchanged.
[[noreturn]] void rethrow_of_launch(const std::string& launch);

}  // namespace offload
