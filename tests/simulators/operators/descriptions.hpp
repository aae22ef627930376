// Arguments of an operator's first phase: tensors, scalars, arrays and lists. They describe; the
// data stays in place. Each is owned by its creator, and copied by the executor.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime_calls.hpp"

// The names that the ABI gives these structs; clients see only pointers.
struct aclTensor {
  offload::acl::DataType type = offload::acl::kDataTypeUndefined;
  offload::acl::Format format = offload::acl::kFormatNd;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::int64_t offset = 0;            // in elements, from `data`
  std::vector<std::int64_t> storage_shape;
  void* data = nullptr;
};

struct aclScalar {
  bool is_real = false;
  std::int64_t integer = 0;
  double real = 0;
  offload::acl::DataType type = offload::acl::kDataTypeUndefined;
};

struct aclIntArray {
  std::vector<std::int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<std::uint8_t> values;
};

struct aclTensorList {
  std::vector<const aclTensor*> tensors;  // owned, as the ABI has it: destroyed with the list
};

struct aclScalarList {
  std::vector<const aclScalar*> scalars;  // owned
};

namespace simulated_operators {

// Live tensors and scalars, for tests that look for leaks.
std::int64_t live_descriptions();

}  // namespace simulated_operators
