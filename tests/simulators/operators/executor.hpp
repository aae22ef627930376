// The two phases of an operator: the first plans it from descriptions, the second launches its
// kernel on a stream. The same code serves eager execution, capture and group update.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "argument_block.hpp"

namespace simulated_operators {

// One operator of the library; constant, and never destroyed.
struct Kernel {
  const char* name;
  // Computes; throws std::exception, which fails the device.
  void (*compute)(const Launch& launch);
  // Throws std::invalid_argument unless the first phase may accept the launch. May be null.
  void (*check)(const Launch& launch) = nullptr;
  std::size_t (*workspace_bytes)(const Launch& launch) = nullptr;  // null: none is needed
  bool may_lack_operands = false;  // whether tensors may be null; `check` then says which
  bool takes_fractals = false;     // whether tensors may be in FRACTAL_NZ; `check` then says which
};

}  // namespace simulated_operators

// The result of the first phase; the second consumes it unless it was made repeatable. Owner: the
// caller, who uses it on one thread at a time.
struct aclOpExecutor {
  aclOpExecutor() { n_live.fetch_add(1); }
  ~aclOpExecutor() { n_live.fetch_sub(1); }
  aclOpExecutor(const aclOpExecutor&) = delete;
  aclOpExecutor& operator=(const aclOpExecutor&) = delete;

  inline static std::atomic<std::int64_t> n_live{0};  // for tests that look for leaks

  const simulated_operators::Kernel* kernel = nullptr;
  simulated_operators::Launch launch;
  std::vector<bool> is_given;               // of each operand, at planning
  std::vector<std::int64_t> offsets_bytes;  // of first elements, from the tensors' data
  std::vector<bool> is_output;
  aclTensor* result = nullptr;  // the last output: its description may be written
  bool is_repeatable = false;
};

namespace simulated_operators {

// Takes the parameters of a first phase in order; tensors and lists of tensors become operands, all
// others attributes.
class Planner {
 public:
  Planner() : executor_(new aclOpExecutor) {}

  void take(const aclTensor* tensor) { add_operand(tensor, false); }
  void take(aclTensor* tensor) {
    add_operand(tensor, true);
    executor_->result = tensor;
  }
  void take(const aclTensorList* list);
  void take(const aclScalar* scalar);
  void take(const aclIntArray* array);
  void take(const char* text);  // of at most eight letters
  void take(double value) { add_real(value); }
  void take(float value) { add_real(value); }
  template <class Integer>
  std::enable_if_t<std::is_integral_v<Integer> || std::is_enum_v<Integer>> take(Integer value) {
    add_integers({static_cast<std::int64_t>(value)});
  }

  // Errors: kAclnnParamNullptr, kAclnnParamInvalid; nothing is left behind then.
  Status finish(const Kernel& kernel, std::uint64_t* workspace_bytes, aclOpExecutor** executor);

 private:
  void add_operand(const aclTensor* tensor, bool is_output);
  void add_integers(std::vector<std::int64_t> values);
  void add_real(double value);

  std::unique_ptr<aclOpExecutor> executor_;
};

// Caches the result of the first phase of this name, if the client has set a key for it on this
// thread (executor_cache.cpp).
void remember(const char* name, const aclOpExecutor& executor);

// `name`: of the first phase.
template <class... Parameters>
Status plan(const char* name, const Kernel& kernel, std::uint64_t* workspace_bytes,
            aclOpExecutor** executor, Parameters... parameters) noexcept {
  try {
    if (const Status status = sim_note(name)) return status;
    Planner planner;
    (planner.take(parameters), ...);
    const Status status = planner.finish(kernel, workspace_bytes, executor);
    if (status == kSuccess) remember(name, **executor);
    return status;
  } catch (const std::exception&) {
    return kAclnnParamInvalid;
  }
}

// The second phase, on any thread that has a context. Errors: kAclnnParamNullptr without an
// executor or a needed workspace, those of the runtime's launch, and those that a test plans for
// `name`. The executor is destroyed even then, unless it is repeatable.
Status launch(const char* name, void* workspace, std::uint64_t workspace_bytes,
              aclOpExecutor* executor, Stream stream) noexcept;

}  // namespace simulated_operators

// Defines both phases of `aclnn<name>`. `parameters` is the first phase's list without its results,
// in parentheses; then follow the operands and attributes that `kernel` takes, in its order.
#define OPERATOR(name, kernel, parameters, ...) \
  OPERATOR_WITH(::simulated_operators::launch, name, kernel, parameters, __VA_ARGS__)

// The same with another second phase than `launch`.
#define OPERATOR_UNWRAP(...) __VA_ARGS__
#define OPERATOR_WITH(second_phase, name, kernel, parameters, ...)                                \
  OPERATORS_EXPORT ::simulated_operators::Status aclnn##name##GetWorkspaceSize(                   \
      OPERATOR_UNWRAP parameters, std::uint64_t* workspace_bytes, aclOpExecutor** executor) {     \
    return ::simulated_operators::plan("aclnn" #name "GetWorkspaceSize", kernel, workspace_bytes, \
                                       executor, __VA_ARGS__);                                    \
  }                                                                                               \
  OPERATORS_EXPORT ::simulated_operators::Status aclnn##name(                                     \
      void* workspace, std::uint64_t workspace_bytes, aclOpExecutor* executor,                    \
      ::offload::acl::Stream stream) {                                                            \
    return second_phase("aclnn" #name, workspace, workspace_bytes, executor, stream);             \
  }
