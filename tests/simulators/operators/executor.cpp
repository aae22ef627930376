#include "executor.hpp"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "elements.hpp"
#include "executor_cache.hpp"

namespace simulated_operators {
namespace {

// The simulator's format of a kernel's binary.
struct BinaryImage {
  char magic[8] = {'S', 'I', 'M', 'K', 'E', 'R', 'N', '1'};
  std::uint64_t n_kernels = 1;
  char name[48] = {};
  std::uint64_t function = 0;
  std::uint64_t user = 0;
  std::uint64_t argument_bytes = 0;  // differs between launches
};
static_assert(sizeof(BinaryImage) == 8 + 8 + 48 + 3 * 8);

// Workspace that every operator requests in addition to its own.
std::atomic<std::uint64_t> more_workspace_bytes{0};

// All of the workspace is written, as kernels may do.
int run(const void* arguments, std::size_t n_bytes, std::uint32_t, void* user) noexcept {
  try {
    const Launch launch = decode(arguments, n_bytes);
    if (launch.workspace_bytes > 0) std::memset(launch.workspace, 0xA5, launch.workspace_bytes);
    static_cast<const Kernel*>(user)->compute(launch);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

struct LoadedKernels {
  std::mutex mutex;
  std::map<const Kernel*, Function> functions;
};

LoadedKernels& loaded_kernels() {
  static auto* const loaded = new LoadedKernels;  // clients launch while they exit
  return *loaded;
}

// Loads the kernel's binary at its first launch.
Status function_of(const Kernel& kernel, Function* function) {
  LoadedKernels& loaded = loaded_kernels();
  const std::lock_guard lock(loaded.mutex);
  Function& known = loaded.functions[&kernel];
  if (known == nullptr) {
    BinaryImage image;
    std::strncpy(image.name, kernel.name, sizeof image.name - 1);
    image.function = reinterpret_cast<std::uint64_t>(&run);
    image.user = reinterpret_cast<std::uint64_t>(&kernel);
    LoadedBinary binary = nullptr;
    Status status = aclrtBinaryLoadFromData(&image, sizeof image, nullptr, &binary);
    if (status == kSuccess) status = aclrtBinaryGetFunction(binary, kernel.name, &known);
    if (status != kSuccess) return status;
  }
  *function = known;
  return kSuccess;
}

// The layout of a tensor in FRACTAL_NZ, whose view is a whole matrix, or its transpose. Throws
// std::invalid_argument where its storage is not that of such a matrix.
void lay_out_in_fractals(const aclTensor& tensor, Operand& operand) {
  constexpr std::int64_t kFractalRows = 16;
  const std::vector<std::int64_t>& storage = tensor.storage_shape;
  const auto rank = static_cast<std::size_t>(operand.rank);
  if (rank < 2 || storage.size() != rank + 2 || tensor.offset != 0) {
    throw std::invalid_argument("a part of what lies in fractals, or no matrix");
  }
  std::size_t rows = rank - 2, columns = rank - 1;
  if (operand.strides[columns] != 1) std::swap(rows, columns);
  const std::int64_t n_rows = operand.shape[rows], n_columns = operand.shape[columns];
  const std::int64_t n_across = storage[rank - 2], n_down = storage[rank - 1];
  const std::int64_t fractal_columns = storage[rank + 1];
  if (operand.strides[columns] != 1 || operand.strides[rows] != n_columns ||
      storage[rank] != kFractalRows || fractal_columns < 1 ||
      n_across != (n_columns + fractal_columns - 1) / fractal_columns ||
      n_down != (n_rows + kFractalRows - 1) / kFractalRows) {
    throw std::invalid_argument("a storage that is not the matrix in fractals");
  }
  operand.fractals = {fractal_columns, n_down * kFractalRows, n_columns};
  std::int64_t stride = operand.fractals.n_elements();
  for (std::size_t dim = rank - 2; dim-- > 0; stride *= operand.shape[dim]) {
    if (storage[dim] != operand.shape[dim]) throw std::invalid_argument("another batch");
    operand.strides[dim] = stride;
  }
}

Operand operand_of(const aclTensor& tensor) {
  const auto rank = static_cast<std::int64_t>(tensor.shape.size());
  if (rank > kMaxRank) throw std::invalid_argument("a tensor of too many dimensions");
  Operand operand;
  operand.type = tensor.type;
  operand.rank = rank;
  operand.data = static_cast<char*>(tensor.data) + tensor.offset * element_bytes(tensor.type);
  for (std::int64_t dim = 0; dim < rank; ++dim) {
    operand.shape[dim] = tensor.shape[static_cast<std::size_t>(dim)];
    operand.strides[dim] = tensor.strides[static_cast<std::size_t>(dim)];
  }
  if (tensor.format == kFormatFractalNz) lay_out_in_fractals(tensor, operand);
  return operand;
}

}  // namespace

void Planner::add_operand(const aclTensor* tensor, bool is_output) {
  aclOpExecutor& executor = *executor_;
  executor.is_given.push_back(tensor != nullptr);
  executor.is_output.push_back(is_output);
  executor.launch.operands.push_back(tensor == nullptr ? Operand() : operand_of(*tensor));
  executor.offsets_bytes.push_back(
      tensor == nullptr ? 0 : tensor->offset * element_bytes(tensor->type));
}

void Planner::take(const aclTensorList* list) {
  if (list == nullptr) return;
  for (const aclTensor* const tensor : list->tensors) add_operand(tensor, false);
}

void Planner::take(const aclScalar* scalar) {
  if (scalar == nullptr) return add_integers({});
  if (scalar->is_real) return add_real(scalar->real);
  add_integers({scalar->integer});
}

void Planner::take(const aclIntArray* array) {
  add_integers(array == nullptr ? std::vector<std::int64_t>() : array->values);
}

void Planner::take(const char* text) {
  std::int64_t letters = 0;
  if (text != nullptr) std::memcpy(&letters, text, strnlen(text, sizeof letters));
  add_integers({letters});
}

void Planner::add_integers(std::vector<std::int64_t> values) {
  Attribute attribute;
  attribute.real = values.empty() ? 0 : static_cast<double>(values.front());
  attribute.integers = std::move(values);
  executor_->launch.attributes.push_back(std::move(attribute));
}

void Planner::add_real(double value) {
  executor_->launch.attributes.push_back(
      Attribute{true, {static_cast<std::int64_t>(value)}, value});
}

Status Planner::finish(const Kernel& kernel, std::uint64_t* workspace_bytes,
                       aclOpExecutor** executor) {
  if (workspace_bytes == nullptr || executor == nullptr) return kAclnnParamNullptr;
  Launch& launch = executor_->launch;
  for (const Operand& operand : launch.operands) {
    if (!operand.is_given() && !kernel.may_lack_operands) return kAclnnParamNullptr;
    if (operand.fractals.is_used() && !kernel.takes_fractals) return kAclnnParamInvalid;
  }
  if (kernel.check != nullptr) kernel.check(launch);
  if (kernel.workspace_bytes != nullptr) launch.workspace_bytes = kernel.workspace_bytes(launch);
  launch.workspace_bytes += more_workspace_bytes;
  executor_->kernel = &kernel;
  *workspace_bytes = launch.workspace_bytes;
  *executor = executor_.release();
  return kSuccess;
}

Status launch(const char* name, void* workspace, std::uint64_t workspace_bytes,
              aclOpExecutor* executor, Stream stream) noexcept {
  if (executor == nullptr) return kAclnnParamNullptr;
  const std::unique_ptr<aclOpExecutor> consumed(executor->is_repeatable ? nullptr : executor);
  if (const Status status = sim_note(name)) return status;
  Launch& launch = executor->launch;
  if (workspace_bytes < launch.workspace_bytes ||
      (workspace == nullptr && launch.workspace_bytes > 0)) {
    return kAclnnParamNullptr;
  }
  launch.workspace = static_cast<char*>(workspace);
  try {
    Function function = nullptr;
    const Status status = function_of(*executor->kernel, &function);
    if (status != kSuccess) return status;
    std::size_t tiling_offset_bytes = 0;
    std::vector<std::uint64_t> block = encode(launch, &tiling_offset_bytes);
    PlaceHolder tiling = {0, static_cast<std::uint32_t>(tiling_offset_bytes)};
    return aclrtLaunchKernelWithHostArgs(function, 1, stream, nullptr, block.data(),
                                         block.size() * sizeof(std::uint64_t), &tiling, 1);
  } catch (const std::exception&) {
    return kAclnnRuntimeError;
  }
}

namespace {

// The index-th of the operands that `wanted` accepts.
template <class Wanted>
Status set_address(aclOpExecutor* executor, std::size_t index, const aclTensor* tensor, void* data,
                   const Wanted& wanted) {
  if (executor == nullptr || tensor == nullptr) return kAclnnInnerNullptr;
  for (std::size_t i = 0; i < executor->is_given.size(); ++i) {
    if (!wanted(i)) continue;
    if (index-- > 0) continue;
    if (!executor->is_given[i]) return kAclnnParamInvalid;
    executor->launch.operands[i].data = static_cast<char*>(data) + executor->offsets_bytes[i];
    return kSuccess;
  }
  return kAclnnParamInvalid;
}

}  // namespace

OPERATORS_EXPORT Status aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  if (executor == nullptr) return kAclnnInnerNullptr;
  if (const Status status = sim_note("aclSetAclOpExecutorRepeatable")) return status;
  executor->is_repeatable = true;
  return kSuccess;
}

OPERATORS_EXPORT Status aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return kSuccess;
}

OPERATORS_EXPORT Status aclSetTensorAddr(aclOpExecutor* executor, std::size_t index,
                                         aclTensor* tensor, void* data) {
  return set_address(executor, index, tensor, data, [](std::size_t) { return true; });
}

OPERATORS_EXPORT Status aclSetInputTensorAddr(aclOpExecutor* executor, std::size_t index,
                                              aclTensor* tensor, void* data) {
  return set_address(executor, index, tensor, data,
                     [&](std::size_t i) { return !executor->is_output[i]; });
}

OPERATORS_EXPORT Status aclSetOutputTensorAddr(aclOpExecutor* executor, std::size_t index,
                                               aclTensor* tensor, void* data) {
  return set_address(executor, index, tensor, data,
                     [&](std::size_t i) { return executor->is_output[i]; });
}

// Controls for tests.
OPERATORS_EXPORT void sim_operators_set_look_alike(std::uint64_t number) { set_look_alike(number); }

OPERATORS_EXPORT void sim_operators_set_padded(std::uint64_t n_operands) { set_padded(n_operands); }
OPERATORS_EXPORT std::int64_t sim_operators_live_descriptions() { return live_descriptions(); }
OPERATORS_EXPORT std::int64_t sim_operators_live_executors() { return aclOpExecutor::n_live; }
// Every first phase from now on requests this many more bytes.
OPERATORS_EXPORT void sim_operators_set_more_workspace(std::uint64_t n_bytes) {
  more_workspace_bytes = n_bytes;
}
// After a reset of the runtime: every kernel is loaded again at its next launch.
OPERATORS_EXPORT void sim_operators_reset() {
  LoadedKernels& loaded = loaded_kernels();
  const std::lock_guard lock(loaded.mutex);
  loaded.functions.clear();
  set_look_alike(0);
  set_padded(0);
  more_workspace_bytes = 0;
  close_executor_cache();
}

}  // namespace simulated_operators
