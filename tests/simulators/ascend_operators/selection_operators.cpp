// Operators whose result's size depends on values: their second phase waits for the device and
// writes the size into the result's description. They cannot be captured.
#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {

extern "C" {
Status aclrtSynchronizeStream(Stream stream);
Status aclrtMemcpy(void* to, std::size_t capacity_bytes, const void* from, std::size_t n_bytes,
                   MemcpyKind kind);
}

namespace {

// Operands: input and mask, which broadcast to each other, and a row of as many elements as could
// be selected. The number of those that are goes into the workspace.
void masked_select(const Launch& launch) {
  Operand shape = launch.operands.at(0);
  const Operand& mask = launch.operands.at(1);
  const Operand& output = launch.operands.at(2);
  for (std::int64_t dim = 0; dim < mask.rank && mask.rank >= shape.rank; ++dim) {
    const std::int64_t extent = launch.operands[0].shape[dim - mask.rank + shape.rank];
    shape.shape[dim] = dim < mask.rank - shape.rank || extent == 1 ? mask.shape[dim] : extent;
  }
  shape.rank = std::max(shape.rank, mask.rank);
  const auto load_element = loader<double>(launch.operands[0].type);
  const auto load_mask = loader<std::int64_t>(mask.type);
  const auto store_element = storer<double>(output.type);
  const std::array<std::array<std::int64_t, kMaxRank>, 2> strides = {
      broadcast_strides(launch.operands[0], shape), broadcast_strides(mask, shape)};
  std::int64_t n_selected = 0;
  walk(shape, strides, [&](const Offsets<2>& offsets) {
    if (load_mask(mask.data + offsets[1]) == 0) return;
    store_element(output.data + n_selected++ * element_bytes(output.type),
                  load_element(launch.operands[0].data + offsets[0]));
  });
  std::memcpy(launch.workspace, &n_selected, sizeof n_selected);
}

const Kernel kMaskedSelect = {"MaskedSelect", masked_select, nullptr,
                              [](const Launch&) { return sizeof(std::int64_t); }};

}  // namespace

OPERATORS_EXPORT Status aclnnMaskedSelectGetWorkspaceSize(const aclTensor* self,
                                                          const aclTensor* mask, aclTensor* out,
                                                          std::uint64_t* workspace_bytes,
                                                          aclOpExecutor** executor) {
  return plan(kMaskedSelect, workspace_bytes, executor, self, mask, out);
}

OPERATORS_EXPORT Status aclnnMaskedSelect(void* workspace, std::uint64_t workspace_bytes,
                                          aclOpExecutor* executor, Stream stream) {
  if (executor == nullptr) return kAclnnParamNullptr;
  aclTensor* const out = executor->result;
  Status status = launch(workspace, workspace_bytes, executor, stream);
  if (status == kSuccess) status = aclrtSynchronizeStream(stream);
  std::int64_t n_selected = 0;
  if (status == kSuccess) {
    status =
        aclrtMemcpy(&n_selected, sizeof n_selected, workspace, sizeof n_selected, kDeviceToHost);
  }
  if (status == kSuccess) out->shape = {n_selected};
  return status;
}

}  // namespace simulated_operators
