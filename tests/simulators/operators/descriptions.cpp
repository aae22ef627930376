#include "descriptions.hpp"

#include <atomic>
#include <cstring>

#include "elements.hpp"

namespace simulated_operators {
namespace {

std::atomic<std::int64_t> n_live{0};

template <class T, class... Arguments>
T* make(Arguments&&... arguments) {
  n_live.fetch_add(1);
  return new T{std::forward<Arguments>(arguments)...};
}

template <class T>
Status destroy(const T* object) {
  if (object == nullptr) return kSuccess;
  n_live.fetch_sub(1);
  delete object;
  return kSuccess;
}

template <class T>
std::vector<T> values_of(const T* values, std::uint64_t n) {
  return values == nullptr ? std::vector<T>() : std::vector<T>(values, values + n);
}

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t dim = shape.size(); dim-- > 0; stride *= shape[dim]) strides[dim] = stride;
  return strides;
}

Status copy_out(const std::vector<std::int64_t>& values, std::int64_t** result, std::uint64_t* n) {
  if (result == nullptr || n == nullptr) return kAclnnParamNullptr;
  *result = new std::int64_t[values.size()];  // the caller deletes it
  std::memcpy(*result, values.data(), values.size() * sizeof(std::int64_t));
  *n = values.size();
  return kSuccess;
}

}  // namespace

std::int64_t live_descriptions() { return n_live.load(); }

extern "C" {
#define EXPORT __attribute__((visibility("default")))

EXPORT Status aclInitTensor(aclTensor* tensor, const std::int64_t* shape, std::uint64_t rank,
                            DataType type, const std::int64_t* strides, std::int64_t offset,
                            Format format, const std::int64_t* storage_shape,
                            std::uint64_t storage_rank, void* data) {
  if (tensor == nullptr) return kAclnnParamNullptr;
  tensor->type = type;
  tensor->format = format;
  tensor->shape = values_of(shape, rank);
  tensor->strides =
      strides == nullptr ? contiguous_strides(tensor->shape) : values_of(strides, rank);
  tensor->offset = offset;
  tensor->storage_shape = values_of(storage_shape, storage_rank);
  tensor->data = data;
  return kSuccess;
}

EXPORT aclTensor* aclCreateTensor(const std::int64_t* shape, std::uint64_t rank, DataType type,
                                  const std::int64_t* strides, std::int64_t offset, Format format,
                                  const std::int64_t* storage_shape, std::uint64_t storage_rank,
                                  void* data) {
  if (sim_note("aclCreateTensor") != kSuccess) return nullptr;
  auto* const tensor = make<aclTensor>();
  aclInitTensor(tensor, shape, rank, type, strides, offset, format, storage_shape, storage_rank,
                data);
  return tensor;
}

EXPORT Status aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }

EXPORT aclScalar* aclCreateScalar(void* value, DataType type) {
  if (value == nullptr || !is_supported(type)) return nullptr;
  if (sim_note("aclCreateScalar") != kSuccess) return nullptr;
  const auto* const bytes = static_cast<const char*>(value);
  return make<aclScalar>(aclScalar{is_real(type), loader<std::int64_t>(type)(bytes),
                                   loader<double>(type)(bytes), type});
}

EXPORT Status aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }

EXPORT aclIntArray* aclCreateIntArray(const std::int64_t* values, std::uint64_t n) {
  return make<aclIntArray>(aclIntArray{values_of(values, n)});
}
EXPORT Status aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }

EXPORT aclFloatArray* aclCreateFloatArray(const float* values, std::uint64_t n) {
  return make<aclFloatArray>(aclFloatArray{values_of(values, n)});
}
EXPORT Status aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }

EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, std::uint64_t n) {
  return make<aclBoolArray>(
      aclBoolArray{values_of(reinterpret_cast<const std::uint8_t*>(values), n)});
}
EXPORT Status aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }

EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, std::uint64_t n) {
  return make<aclTensorList>(aclTensorList{{tensors, tensors + n}});
}
EXPORT Status aclDestroyTensorList(const aclTensorList* list) {
  if (list == nullptr) return kSuccess;
  for (const aclTensor* const tensor : list->tensors) destroy(tensor);
  return destroy(list);
}

EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, std::uint64_t n) {
  return make<aclScalarList>(aclScalarList{{scalars, scalars + n}});
}
EXPORT Status aclDestroyScalarList(const aclScalarList* list) {
  if (list == nullptr) return kSuccess;
  for (const aclScalar* const scalar : list->scalars) destroy(scalar);
  return destroy(list);
}

EXPORT Status aclGetViewShape(const aclTensor* tensor, std::int64_t** shape, std::uint64_t* rank) {
  return tensor == nullptr ? kAclnnParamNullptr : copy_out(tensor->shape, shape, rank);
}
EXPORT Status aclGetViewStrides(const aclTensor* tensor, std::int64_t** strides,
                                std::uint64_t* rank) {
  return tensor == nullptr ? kAclnnParamNullptr : copy_out(tensor->strides, strides, rank);
}
EXPORT Status aclGetStorageShape(const aclTensor* tensor, std::int64_t** shape,
                                 std::uint64_t* rank) {
  return tensor == nullptr ? kAclnnParamNullptr : copy_out(tensor->storage_shape, shape, rank);
}
EXPORT Status aclGetViewOffset(const aclTensor* tensor, std::int64_t* offset) {
  if (tensor == nullptr || offset == nullptr) return kAclnnParamNullptr;
  *offset = tensor->offset;
  return kSuccess;
}
EXPORT Status aclGetFormat(const aclTensor* tensor, Format* format) {
  if (tensor == nullptr || format == nullptr) return kAclnnParamNullptr;
  *format = tensor->format;
  return kSuccess;
}
EXPORT Status aclGetDataType(const aclTensor* tensor, DataType* type) {
  if (tensor == nullptr || type == nullptr) return kAclnnParamNullptr;
  *type = tensor->type;
  return kSuccess;
}
EXPORT Status aclGetRawTensorAddr(const aclTensor* tensor, void** data) {
  if (tensor == nullptr || data == nullptr) return kAclnnParamNullptr;
  *data = tensor->data;
  return kSuccess;
}
EXPORT Status aclSetRawTensorAddr(aclTensor* tensor, void* data) {
  if (tensor == nullptr) return kAclnnParamNullptr;
  tensor->data = data;
  return kSuccess;
}
#undef EXPORT
}

}  // namespace simulated_operators
