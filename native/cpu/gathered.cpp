// Embeddings whose table is not in memory: the indexed rows are read into the result.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "cpu/cpu_resident.hpp"
#include "offload/dtype_name.hpp"
#include "offload/errors.hpp"

namespace offload {
namespace {

// The indices in the order of their elements, whatever their strides.
void take_indices(const at::Tensor& tensor, std::vector<std::int64_t>& indices) {
  const at::Tensor flat = tensor.contiguous();
  const auto take = [&](const auto* begin) { indices.assign(begin, begin + flat.numel()); };
  if (flat.scalar_type() == c10::ScalarType::Int) {
    take(flat.const_data_ptr<std::int32_t>());
  } else {
    take(flat.const_data_ptr<std::int64_t>());
  }
}

}  // namespace

void CpuResident::check_gathered(const CpuLaunch& launch) const {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("a launch that gathers rows: expected " + what);
  };
  if (!stream_) refuse("a stream of weights");
  check_table(stream_->plan(), *launch.table);
  if (launch.operator_name != "aten::embedding" || !launch.overload.empty()) {
    refuse("aten::embedding, got " + launch.operator_name + "." + launch.overload);
  }
  const c10::ScalarType dtype = launch.arguments.at(1).toTensor().scalar_type();
  if (dtype != c10::ScalarType::Int && dtype != c10::ScalarType::Long) {
    refuse("indices of int32 or int64, got " + dtype_name(dtype));
  }
  const std::size_t n_rows = static_cast<std::size_t>(launch.arguments[1].toTensor().numel());
  if (launch.outputs.size() != 1 || !launch.outputs.front().is_contiguous() ||
      launch.outputs.front().nbytes() != n_rows * launch.table->row_bytes) {
    refuse("one contiguous result of a row for each index");
  }
}

void CpuResident::gather(CpuLaunch& launch) {
  take_indices(launch.arguments[1].toTensor(), indices_);
  const auto index = static_cast<std::size_t>(&launch - launches_.data());
  stream_->gather(index, *launch.table, indices_,
                  static_cast<std::byte*>(launch.outputs.front().mutable_data_ptr()));
}

// The operator's result as recorded, on a table of only the required rows. The recorded tensor
// gives their places, and they are read as by transfers: not through the page cache.
at::Tensor CpuResident::embedded_from_few(const CpuLaunch& launch) {
  const at::Tensor& indices = launch.arguments[1].toTensor();
  take_indices(indices, indices_);
  std::vector<std::int64_t> rows = indices_;
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const at::Tensor& table = launch.arguments[0].toTensor();
  const auto item_bytes = table.element_size();
  const RowTable recorded{launch.table->weight,
                          static_cast<std::size_t>(table.storage_offset() * item_bytes),
                          static_cast<std::size_t>(table.size(0)),
                          static_cast<std::size_t>(table.size(1) * item_bytes)};
  const at::Tensor few =
      at::empty({static_cast<std::int64_t>(rows.size()), table.size(1)}, table.options());
  stream_->read_rows(recorded, rows, static_cast<std::byte*>(few.mutable_data_ptr()));
  const at::Tensor places = at::empty(indices.sizes(), at::TensorOptions(at::kLong));
  std::transform(indices_.begin(), indices_.end(), places.mutable_data_ptr<std::int64_t>(),
                 [&](std::int64_t index) {
                   return std::lower_bound(rows.begin(), rows.end(), index) - rows.begin();
                 });
  std::vector<c10::IValue> stack = launch.arguments;
  stack[0] = few;
  stack[1] = places;
  launch.call->callBoxed(&stack);
  return stack.at(0).toTensor();
}

}  // namespace offload
