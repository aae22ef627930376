// What residents share that call torch's operators: looking one up, and what is made of what it
// returned or threw.
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

// The tensors that an operator left on the stack, lists flattened; undefined ones for non-tensors.
std::vector<at::Tensor> tensors_on(const std::vector<c10::IValue>& stack);

// Refuses a result that is laid out otherwise than recorded, `launch` being the launch in words:
// BindingError where the recorded layout is a guard, CaptureError for the right shape laid out in
// another way, ExecutionError else.
void check_result(const at::Tensor& result, const TensorLayout& layout, std::int64_t offset_bytes,
                  bool guards_shape, const std::string& launch);

// Refuses a number that was read on the host and is not the recorded one: BindingError.
void check_guard(const c10::IValue& found, const c10::IValue& recorded, const std::string& source,
                 const std::string& operator_name);

// Called where a launch's error is being handled: rethrows it as ExecutionError, or OutOfMemory
// where the allocator of the CPU or of a device has no memory, that says which launch it was.
// Errors of ours that name it already go on as they are.
[[noreturn]] void rethrow_of_launch(const std::string& launch);

}  // namespace offload
