// Operators whose result's size depends on values: their second phase waits for the device and
// writes the size into the result's description. They cannot be captured.
#include <vector>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {

extern "C" {
Status aclrtSynchronizeStream(Stream stream);
Status aclrtMemcpy(void* to, std::size_t capacity_bytes, const void* from, std::size_t n_bytes,
                   MemcpyKind kind);
}

namespace {

// Operands: input and mask, which broadcast to each other, and a row with space for all elements.
// The number of selected elements goes into the workspace.
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

// Operands: input, and a table of the positions of nonzero elements: a row for each of them, or a
// column where the attribute says so. It has space for all elements.
void find_nonzero(const Launch& launch) {
  const Operand& input = launch.operands.at(0);
  const Operand& output = launch.operands.at(1);
  const auto load_element = loader<double>(input.type);
  const auto store_position = storer<std::int64_t>(output.type);
  const std::array<std::array<std::int64_t, kMaxRank>, 1> strides = {
      broadcast_strides(input, input)};
  std::vector<std::int64_t> found;  // by index in row-major order
  std::int64_t n = 0;
  walk(input, strides, [&](const Offsets<1>& offsets) {
    if (load_element(input.data + offsets[0]) != 0) found.push_back(n);
    ++n;
  });
  const auto n_found = static_cast<std::int64_t>(found.size());
  const bool is_column = launch.attributes.front().integer() != 0;
  for (std::int64_t i = 0; i < n_found; ++i) {
    std::int64_t rest = found[static_cast<std::size_t>(i)];
    for (std::int64_t dim = input.rank; dim-- > 0; rest /= input.shape[dim]) {
      const std::int64_t place = is_column ? dim * n_found + i : i * input.rank + dim;
      store_position(output.data + place * element_bytes(output.type), rest % input.shape[dim]);
    }
  }
  std::memcpy(launch.workspace, &n_found, sizeof n_found);
}

const Kernel kNonzero = {"Nonzero", find_nonzero, nullptr,
                         [](const Launch&) { return sizeof(std::int64_t); }};

// Launches, waits, and reads an extent of the result, the first or the last, from the workspace.
template <bool kIsLast>
Status launch_and_wait(const char* name, void* workspace, std::uint64_t workspace_bytes,
                       aclOpExecutor* executor, Stream stream) {
  if (executor == nullptr) return kAclnnParamNullptr;
  aclTensor* const out = executor->result;
  Status status = launch(name, workspace, workspace_bytes, executor, stream);
  if (status == kSuccess) status = aclrtSynchronizeStream(stream);
  std::int64_t n_found = 0;
  if (status == kSuccess) {
    status = aclrtMemcpy(&n_found, sizeof n_found, workspace, sizeof n_found, kDeviceToHost);
  }
  if (status == kSuccess) (kIsLast ? out->shape.back() : out->shape.front()) = n_found;
  return status;
}

}  // namespace

OPERATOR_WITH(launch_and_wait<false>, MaskedSelect, kMaskedSelect,
              (const aclTensor* self, const aclTensor* mask, aclTensor* out), self, mask, out)
OPERATOR_WITH(launch_and_wait<false>, Nonzero, kNonzero, (const aclTensor* self, aclTensor* out),
              self, false, out)
OPERATOR_WITH(launch_and_wait<true>, NonzeroV2, kNonzero, (const aclTensor* self, aclTensor* out),
              self, true, out)

}  // namespace simulated_operators
