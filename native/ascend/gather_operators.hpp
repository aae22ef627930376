// Operators of the Ascend operator libraries on memory of our own: the parts of a gather without a
// kernel.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "ascend/runtime.hpp"

namespace offload::acl {

// X(name here, symbol, whether it is required, result, signature).
#define OFFLOAD_ACLNN_FUNCTIONS(X)                                                              \
  X(create_tensor, "aclCreateTensor", true, Tensor,                                             \
    (const std::int64_t* shape, std::uint64_t rank, DataType type, const std::int64_t* strides, \
     std::int64_t offset, Format format, const std::int64_t* storage_shape,                     \
     std::uint64_t storage_rank, void* data))                                                   \
  X(destroy_tensor, "aclDestroyTensor", true, Error, (Tensor tensor))                           \
  X(create_scalar, "aclCreateScalar", true, Scalar, (void* value, DataType type))               \
  X(destroy_scalar, "aclDestroyScalar", true, Error, (Scalar scalar))                           \
  X(set_repeatable, "aclSetAclOpExecutorRepeatable", false, Error, (OperatorExecutor executor)) \
  X(destroy_executor, "aclDestroyAclOpExecutor", true, Error, (OperatorExecutor executor))      \
  X(plan_index_select, "aclnnIndexSelectGetWorkspaceSize", true, Error,                         \
    (Tensor self, std::int64_t dimension, Tensor index, Tensor out,                             \
     std::uint64_t* workspace_bytes, OperatorExecutor* executor))                               \
  X(index_select, "aclnnIndexSelect", true, Error,                                              \
    (void* workspace, std::uint64_t workspace_bytes, OperatorExecutor executor, Stream stream)) \
  X(plan_add, "aclnnAddGetWorkspaceSize", true, Error,                                          \
    (Tensor self, Tensor other, Scalar alpha, Tensor out, std::uint64_t* workspace_bytes,       \
     OperatorExecutor* executor))                                                               \
  X(add, "aclnnAdd", true, Error,                                                               \
    (void* workspace, std::uint64_t workspace_bytes, OperatorExecutor executor, Stream stream))

// The function table of the operator libraries, each symbol looked up in all of them:
// libopapi_math.so and libopapi_nn.so, libopapi.so (which these replace), libaclnn_math.so,
// libaclnn_nn.so and libnnopbase.so. They are opened at the first use; without a library, the
// symbols that only it has are missing.
//
// Owner: the process; never closed. Thread: any. Errors: get throws BackendUnavailable, which names
// the missing symbols.
class GatherOperators {
 public:
  // Searches once, and again after a search that did not find everything.
  static const GatherOperators& get();

  // The required symbols that are missing, separated by commas; else empty. BackendUnavailable as
  // Runtime::get.
  static std::string missing();

#define OFFLOAD_DECLARE(name, symbol, needed, result, signature) result(*name) signature = nullptr;
  OFFLOAD_ACLNN_FUNCTIONS(OFFLOAD_DECLARE)
#undef OFFLOAD_DECLARE

 private:
  // Returns the required symbols that are missing.
  std::string open();
  static std::string find(const GatherOperators*& found);
};

// A tensor of one dimension, as an operand: all of a memory, or its beginning.
//
// Owner: one object; the memory must outlive it. Errors: the constructor throws ExecutionError.
class OperatorTensor {
 public:
  OperatorTensor(const Runtime& runtime, const GatherOperators& operators,
                 const DeviceMemory& memory, DataType type, std::size_t n_elements);
  ~OperatorTensor();
  OperatorTensor(const OperatorTensor&) = delete;
  OperatorTensor& operator=(const OperatorTensor&) = delete;

  Tensor handle() const { return tensor_; }

 private:
  const Runtime& runtime_;
  const GatherOperators& operators_;
  Tensor tensor_;
};

// An integer, as an operand.
//
// Owner: one object. Errors: the constructor throws ExecutionError.
class OperatorScalar {
 public:
  OperatorScalar(const Runtime& runtime, const GatherOperators& operators, std::int64_t value);
  ~OperatorScalar();
  OperatorScalar(const OperatorScalar&) = delete;
  OperatorScalar& operator=(const OperatorScalar&) = delete;

  Scalar handle() const { return scalar_; }

 private:
  const Runtime& runtime_;
  const GatherOperators& operators_;
  Scalar scalar_;
};

// An operator on operands at fixed addresses: planned once if its executor can be made repeatable,
// else each time.
//
// Owner: one object, which its operands outlive. Thread: callers serialise, with the device's
// context current. Errors: the constructor and enqueue throw ExecutionError, with the operator's
// name; then a repeatable executor may be enqueued again; any other has been consumed.
class FixedOperator {
 public:
  using FirstPhase = std::function<Error(std::uint64_t* workspace_bytes, OperatorExecutor*)>;
  using SecondPhase = Error (*)(void* workspace, std::uint64_t workspace_bytes, OperatorExecutor,
                                Stream);

  // `name`: the operator's second phase.
  FixedOperator(const Runtime& runtime, const GatherOperators& operators, const char* name,
                FirstPhase first_phase, SecondPhase second_phase);
  ~FixedOperator();
  FixedOperator(const FixedOperator&) = delete;
  FixedOperator& operator=(const FixedOperator&) = delete;

  std::uint64_t workspace_bytes() const { return workspace_bytes_; }

  // The number of calls of the first phase.
  std::uint64_t n_plans() const { return n_plans_; }

  // `workspace`: at least workspace_bytes, in use until the operator has run.
  void enqueue(const DeviceMemory& workspace, Stream stream);

 private:
  OperatorExecutor plan();
  void destroy(OperatorExecutor executor) const;

  const Runtime& runtime_;
  const GatherOperators& operators_;
  std::string name_;
  FirstPhase first_phase_;
  SecondPhase second_phase_;
  std::uint64_t workspace_bytes_ = 0;
  std::uint64_t n_plans_ = 0;
  OperatorExecutor executor_ = nullptr;  // null: not repeatable
};

}  // namespace offload::acl
