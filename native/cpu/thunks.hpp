// Typed out-variants of frequent operators, called without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace offload {

// Computes an operator into given outputs. `arguments` are those of the functional operator in
// schema order; `outputs` its results in order, of the right shape, dtype and strides.
using Thunk = void (*)(const c10::IValue* arguments, at::Tensor* outputs);

// The thunk of a functional operator such as `aten::add.Tensor`, or nullptr.
Thunk find_thunk(const std::string& operator_name);

}  // namespace offload
