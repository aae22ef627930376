#include "cpu/thunks.hpp"

#include <ATen/native/layer_norm.h>
#include <ATen/ops/_log_softmax_cpu_dispatch.h>
#include <ATen/ops/_softmax_cpu_dispatch.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/cat_cpu_dispatch.h>
#include <ATen/ops/clamp_min_cpu_dispatch.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/cos_cpu_dispatch.h>
#include <ATen/ops/div_cpu_dispatch.h>
#include <ATen/ops/eq_cpu_dispatch.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/index_select_cpu_dispatch.h>
#include <ATen/ops/mean_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/neg_cpu_dispatch.h>
#include <ATen/ops/pow_cpu_dispatch.h>
#include <ATen/ops/rsqrt_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/sin_cpu_dispatch.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>
#include <ATen/ops/sub_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>
#include <ATen/ops/tanh_cpu_dispatch.h>
#include <ATen/ops/where_cpu_dispatch.h>

#include <unordered_map>

namespace offload {
namespace {

using c10::IValue;

std::optional<c10::ScalarType> optional_dtype(const IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toScalarType());
}

template <at::Tensor& (*kernel)(at::Tensor&, const at::Tensor&)>
void unary(const IValue* arguments, at::Tensor* outputs) {
  kernel(outputs[0], arguments[0].toTensor());
}

template <at::Tensor& (*kernel)(at::Tensor&, const at::Tensor&, const at::Tensor&)>
void binary(const IValue* arguments, at::Tensor* outputs) {
  kernel(outputs[0], arguments[0].toTensor(), arguments[1].toTensor());
}

void add(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::add_out(outputs[0], arguments[0].toTensor(), arguments[1].toTensor(),
                   arguments[2].toScalar());
}

void sub(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::sub_out(outputs[0], arguments[0].toTensor(), arguments[1].toTensor(),
                   arguments[2].toScalar());
}

void relu(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::clamp_min_out(outputs[0], arguments[0].toTensor(), 0);
}

void addmm(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::addmm_out(outputs[0], arguments[0].toTensor(), arguments[1].toTensor(),
                     arguments[2].toTensor(), arguments[3].toScalar(), arguments[4].toScalar());
}

void baddbmm(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::baddbmm_out(outputs[0], arguments[0].toTensor(), arguments[1].toTensor(),
                       arguments[2].toTensor(), arguments[3].toScalar(), arguments[4].toScalar());
}

void gelu(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::gelu_out(outputs[0], arguments[0].toTensor(), arguments[1].toStringView());
}

void pow_scalar(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::pow_out(outputs[0], arguments[0].toTensor(), arguments[1].toScalar());
}

void eq_scalar(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::eq_out(outputs[0], arguments[0].toTensor(), arguments[1].toScalar());
}

void softmax(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::_softmax_out(outputs[0], arguments[0].toTensor(), arguments[1].toInt(),
                        arguments[2].toBool());
}

void log_softmax(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::_log_softmax_out(outputs[0], arguments[0].toTensor(), arguments[1].toInt(),
                            arguments[2].toBool());
}

void mean_dim(const IValue* arguments, at::Tensor* outputs) {
  if (arguments[1].isNone()) {
    at::cpu::mean_out(outputs[0], arguments[0].toTensor(), at::OptionalIntArrayRef(),
                      arguments[2].toBool(), optional_dtype(arguments[3]));
    return;
  }
  const auto dims = arguments[1].toDimVector();
  at::cpu::mean_out(outputs[0], arguments[0].toTensor(), at::OptionalIntArrayRef(dims),
                    arguments[2].toBool(), optional_dtype(arguments[3]));
}

void sum_dim(const IValue* arguments, at::Tensor* outputs) {
  if (arguments[1].isNone()) {
    at::cpu::sum_out(outputs[0], arguments[0].toTensor(), at::OptionalIntArrayRef(),
                     arguments[2].toBool(), optional_dtype(arguments[3]));
    return;
  }
  const auto dims = arguments[1].toDimVector();
  at::cpu::sum_out(outputs[0], arguments[0].toTensor(), at::OptionalIntArrayRef(dims),
                   arguments[2].toBool(), optional_dtype(arguments[3]));
}

void cat(const IValue* arguments, at::Tensor* outputs) {
  const auto tensors = arguments[0].toTensorVector();
  at::cpu::cat_out(outputs[0], at::ITensorListRef(tensors), arguments[1].toInt());
}

void where_self(const IValue* arguments, at::Tensor* outputs) {
  at::cpu::where_out(outputs[0], arguments[0].toTensor(), arguments[1].toTensor(),
                     arguments[2].toTensor());
}

// clone and _to_copy have only generated out-variants, which allocate and then copy.
void copy(const IValue* arguments, at::Tensor* outputs) {
  outputs[0].copy_(arguments[0].toTensor());
}

// embedding is index_select on flat indices, reshaped; its own out-variant allocates.
void embedding(const IValue* arguments, at::Tensor* outputs) {
  const at::Tensor& weight = arguments[0].toTensor();
  const at::Tensor& indices = arguments[1].toTensor();
  const at::Tensor flat_indices = indices.dim() == 1 ? indices : indices.reshape({-1});
  at::Tensor rows = outputs[0].view({flat_indices.numel(), weight.size(1)});
  at::cpu::index_select_out(rows, weight, 0, flat_indices);
}

#ifdef OFFLOAD_HAS_LAYER_NORM_KERNEL
// The kernel behind native_layer_norm, which writes all three results in place.
void native_layer_norm(const IValue* arguments, at::Tensor* outputs) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::Tensor weight = arguments[2].isNone() ? at::Tensor() : arguments[2].toTensor();
  const at::Tensor bias = arguments[3].isNone() ? at::Tensor() : arguments[3].toTensor();
  const auto shape = arguments[1].toDimVector();
  const auto [rows, columns] = at::native::_check_layer_norm_inputs(input, shape, weight, bias);
  TORCH_CHECK(input.is_contiguous() && rows > 0);
  at::native::LayerNormKernel(at::kCPU, input, weight, bias, rows, columns, arguments[4].toDouble(),
                              &outputs[0], &outputs[1], &outputs[2]);
}
#endif

}  // namespace

Thunk find_thunk(const std::string& operator_name) {
  static const std::unordered_map<std::string, Thunk> thunks = {
      {"aten::add.Tensor", add},
      {"aten::sub.Tensor", sub},
      {"aten::mul.Tensor", binary<at::cpu::mul_out>},
      {"aten::div.Tensor", binary<at::cpu::div_out>},
      {"aten::mm", binary<at::cpu::mm_out>},
      {"aten::bmm", binary<at::cpu::bmm_out>},
      {"aten::addmm", addmm},
      {"aten::baddbmm", baddbmm},
      {"aten::relu", relu},
      {"aten::sigmoid", unary<at::cpu::sigmoid_out>},
      {"aten::tanh", unary<at::cpu::tanh_out>},
      {"aten::exp", unary<at::cpu::exp_out>},
      {"aten::sqrt", unary<at::cpu::sqrt_out>},
      {"aten::rsqrt", unary<at::cpu::rsqrt_out>},
      {"aten::neg", unary<at::cpu::neg_out>},
      {"aten::sin", unary<at::cpu::sin_out>},
      {"aten::cos", unary<at::cpu::cos_out>},
      {"aten::silu", unary<at::cpu::silu_out>},
      {"aten::gelu", gelu},
      {"aten::pow.Tensor_Scalar", pow_scalar},
      {"aten::eq.Scalar", eq_scalar},
      {"aten::_softmax", softmax},
      {"aten::_log_softmax", log_softmax},
      {"aten::mean.dim", mean_dim},
      {"aten::sum.dim_IntList", sum_dim},
      {"aten::cat", cat},
      {"aten::where.self", where_self},
      {"aten::clone", copy},
      {"aten::_to_copy", copy},
      {"aten::embedding", embedding},
#ifdef OFFLOAD_HAS_LAYER_NORM_KERNEL
      {"aten::native_layer_norm", native_layer_norm},
#endif
  };
  const auto found = thunks.find(operator_name);
  return found == thunks.end() ? nullptr : found->second;
}

}  // namespace offload
