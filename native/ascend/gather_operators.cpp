#include "ascend/gather_operators.hpp"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

// Newer releases of CANN have libopapi_math.so and libopapi_nn.so in place of libopapi.so, which is
// deprecated.
constexpr std::array<const char*, 6> kOperatorLibraries = {"libopapi_math.so", "libopapi_nn.so",
                                                           "libopapi.so",      "libaclnn_math.so",
                                                           "libaclnn_nn.so",   "libnnopbase.so"};

// The operator libraries. They are large, so each is opened only when a symbol is not in the
// earlier ones. They are never closed.
class Libraries {
 public:
  void* resolve(const char* symbol) {
    for (std::size_t index = 0; index < kOperatorLibraries.size(); ++index) {
      if (index == handles_.size()) {
        handles_.push_back(dlopen(kOperatorLibraries[index], RTLD_NOW | RTLD_GLOBAL));
      }
      void* const found = handles_[index] == nullptr ? nullptr : dlsym(handles_[index], symbol);
      if (found != nullptr) return found;
    }
    return nullptr;
  }

 private:
  std::vector<void*> handles_;  // null: not available
};

[[noreturn]] void fail_to_describe(const Runtime& runtime, const char* function) {
  const char* const message = runtime.get_recent_error_message();
  throw ExecutionError("describing the operands of the refresh of kernel arguments: " +
                       std::string(function) + " returned nothing" +
                       (message != nullptr && *message != '\0' ? ": " + std::string(message) : ""));
}

}  // namespace

std::string GatherOperators::open() {
  Libraries libraries;
  std::string missing;
#define OFFLOAD_RESOLVE(name, symbol, needed, result, signature)      \
  name = reinterpret_cast<decltype(name)>(libraries.resolve(symbol)); \
  if (needed && name == nullptr) {                                    \
    missing += (missing.empty() ? "" : ", ") + std::string(symbol);   \
  }
  OFFLOAD_ACLNN_FUNCTIONS(OFFLOAD_RESOLVE)
#undef OFFLOAD_RESOLVE
  return missing;
}

std::string GatherOperators::find(const GatherOperators*& found) {
  Runtime::get();
  static std::mutex mutex;
  static GatherOperators operators;
  static bool is_open = false;
  const std::lock_guard lock(mutex);
  const std::string missing = is_open ? "" : operators.open();
  is_open = missing.empty();
  found = &operators;
  return missing;
}

const GatherOperators& GatherOperators::get() {
  const GatherOperators* found = nullptr;
  const std::string missing = find(found);
  if (missing.empty()) return *found;
  throw BackendUnavailable("refreshing kernel arguments by operators needs " + missing +
                           ", which no operator library here has (libopapi_math.so, "
                           "libopapi_nn.so, libopapi.so, libaclnn_math.so, libaclnn_nn.so, "
                           "libnnopbase.so): install CANN's operators");
}

std::string GatherOperators::missing() {
  const GatherOperators* found = nullptr;
  return find(found);
}

OperatorTensor::OperatorTensor(const Runtime& runtime, const GatherOperators& operators,
                               const DeviceMemory& memory, DataType type, std::size_t n_elements)
    : runtime_(runtime), operators_(operators) {
  const auto shape = static_cast<std::int64_t>(n_elements);
  const std::int64_t stride = 1;
  tensor_ =
      operators.create_tensor(&shape, 1, type, &stride, 0, kFormatNd, &shape, 1, memory.data());
  if (tensor_ == nullptr) fail_to_describe(runtime, "aclCreateTensor");
}

OperatorTensor::~OperatorTensor() {
  if (!runtime_.is_forked()) operators_.destroy_tensor(tensor_);
}

OperatorScalar::OperatorScalar(const Runtime& runtime, const GatherOperators& operators,
                               std::int64_t value)
    : runtime_(runtime), operators_(operators), scalar_(operators.create_scalar(&value, kInt64)) {
  if (scalar_ == nullptr) fail_to_describe(runtime, "aclCreateScalar");
}

OperatorScalar::~OperatorScalar() {
  if (!runtime_.is_forked()) operators_.destroy_scalar(scalar_);
}

FixedOperator::FixedOperator(const Runtime& runtime, const GatherOperators& operators,
                             const char* name, FirstPhase first_phase, SecondPhase second_phase)
    : runtime_(runtime),
      operators_(operators),
      name_(name),
      first_phase_(std::move(first_phase)),
      second_phase_(second_phase) {
  OperatorExecutor planned = plan();
  if (operators_.set_repeatable != nullptr && operators_.set_repeatable(planned) == kSuccess) {
    executor_ = planned;
    return;
  }
  runtime_.get_recent_error_message();  // clears it
  destroy(planned);
}

FixedOperator::~FixedOperator() {
  if (executor_ != nullptr) destroy(executor_);
}

void FixedOperator::destroy(OperatorExecutor executor) const {
  if (!runtime_.is_forked()) operators_.destroy_executor(executor);
}

// The same operands need the same workspace each time. A plan that needs more than at first may not
// run, since the workspace in use may not be freed.
OperatorExecutor FixedOperator::plan() {
  std::uint64_t n_bytes = 0;
  OperatorExecutor executor = nullptr;
  const Error error = first_phase_(&n_bytes, &executor);
  if (error != kSuccess) runtime_.fail(error, "planning " + name_ + " (GetWorkspaceSize)");
  if (n_plans_++ == 0) workspace_bytes_ = n_bytes;
  if (n_bytes <= workspace_bytes_) return executor;
  destroy(executor);
  throw ExecutionError("planning " + name_ + ": it needs " + std::to_string(n_bytes) +
                       " bytes of workspace, and requested " + std::to_string(workspace_bytes_) +
                       " when the program was loaded");
}

void FixedOperator::enqueue(const DeviceMemory& workspace, Stream stream) {
  OperatorExecutor executor = executor_ != nullptr ? executor_ : plan();
  const Error error =
      second_phase_(workspace.data(), workspace_bytes_, executor, stream);  // consumes the executor
  if (error != kSuccess) runtime_.fail(error, "refreshing kernel arguments by " + name_);
}

}  // namespace offload::acl
