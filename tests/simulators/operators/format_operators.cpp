// The operator that casts between plain memory and FRACTAL_NZ. Its signatures, accepted arguments
// and codes are those of its documentation.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "elements.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

constexpr std::int64_t kFractalRows = 16, kFractalRowBytes = 32;

// Whether the memory's layout is shape and strides.
bool is_plain(int format) {
  constexpr int kPlain[] = {kFormatNd, kFormatNcl, kFormatNchw, kFormatNcdhw};
  return std::find(std::begin(kPlain), std::end(kPlain), format) != std::end(kPlain);
}

bool is_contiguous(const Operand& operand) {
  std::int64_t stride = 1;
  for (std::int64_t dim = operand.rank; dim-- > 0; stride *= operand.shape[dim]) {
    if (operand.fractals.is_used() && dim < operand.rank - 2) break;  // batches are always fused
    if (operand.shape[dim] != 1 && operand.strides[dim] != stride) return false;
  }
  return true;
}

// The position of the element at `position`, in elements.
std::int64_t place_of(const Operand& operand, const std::int64_t* position) {
  std::int64_t batch = 0, matrix = 0;
  for (std::int64_t dim = 0; dim < operand.rank; ++dim) {
    (dim < operand.rank - 2 ? batch : matrix) += position[dim] * operand.strides[dim];
  }
  return batch + (operand.fractals.is_used() ? operand.fractals.place(matrix) : matrix);
}

void clear(const Operand& operand) {
  std::int64_t n_elements = operand.fractals.n_elements();
  for (std::int64_t dim = 0; dim < operand.rank - 2; ++dim) n_elements *= operand.shape[dim];
  std::memset(operand.data, 0, static_cast<std::size_t>(n_elements * element_bytes(operand.type)));
}

// Operands: the source, the destination. One of them is in fractals.
void cast(const Launch& launch) {
  const Operand& source = launch.operands.at(0);
  const Operand& destination = launch.operands.at(1);
  if (destination.fractals.is_used()) clear(destination);
  const std::int64_t size = element_bytes(source.type);
  std::int64_t position[kMaxRank] = {};
  const std::int64_t n_elements = source.n_elements();
  for (std::int64_t n = 0; n < n_elements; ++n) {
    std::memcpy(destination.data + place_of(destination, position) * size,
                source.data + place_of(source, position) * size, static_cast<std::size_t>(size));
    for (std::int64_t dim = source.rank; dim-- > 0 && ++position[dim] == source.shape[dim];) {
      position[dim] = 0;
    }
  }
}

void check_cast(const Launch& launch) {
  const Operand& source = launch.operands.at(0);
  const Operand& destination = launch.operands.at(1);
  const bool fits = source.type == destination.type && source.rank == destination.rank &&
                    std::equal(source.shape, source.shape + source.rank, destination.shape) &&
                    source.fractals.is_used() != destination.fractals.is_used() &&
                    is_contiguous(source) && is_contiguous(destination);
  if (!fits) throw std::invalid_argument("tensors that are no cast of each other");
}

const Kernel kFormatCast = {"TransData", cast, check_cast, nullptr, false, true};

// The shape of a matrix's storage in fractals whose rows hold 32 bytes of elements of `type`.
std::vector<std::int64_t> in_fractals(const std::vector<std::int64_t>& shape, DataType type) {
  const std::int64_t fractal_columns = kFractalRowBytes / element_bytes(type);
  std::vector<std::int64_t> storage(shape.begin(), shape.end() - 2);
  const std::int64_t n_rows = shape[shape.size() - 2], n_columns = shape.back();
  storage.push_back((n_columns + fractal_columns - 1) / fractal_columns);
  storage.push_back((n_rows + kFractalRows - 1) / kFractalRows);
  storage.push_back(kFractalRows);
  storage.push_back(fractal_columns);
  return storage;
}

bool takes_type(DataType type) {
  constexpr DataType kTaken[] = {kFloat, kFloat16, kBfloat16, kInt8, kUint8, kInt32};
  return std::find(std::begin(kTaken), std::end(kTaken), type) != std::end(kTaken);
}

Status storage_of_cast(const aclTensor& source, int format, DataType type_of_rows,
                       std::vector<std::int64_t>* storage) {
  const std::vector<std::int64_t>& shape = source.shape;
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (shape.size() < 2 || shape.size() > 6 || is_empty || !takes_type(source.type) ||
      !takes_type(type_of_rows) || !(is_plain(format) || format == kFormatFractalNz)) {
    return kAclnnParamInvalid;
  }
  if (is_plain(source.format) == is_plain(format)) return kAclnnRuntimeError;
  *storage = is_plain(format) ? shape : in_fractals(shape, type_of_rows);
  return kSuccess;
}

}  // namespace

// The storage of a cast's result; the caller deletes `shape`. A row of a fractal holds as many
// elements as 32 bytes hold of `type_of_rows`; -1: of the source's type.
OPERATORS_EXPORT Status aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* source,
                                                                 int format, int type_of_rows,
                                                                 std::int64_t** shape,
                                                                 std::uint64_t* rank,
                                                                 int* actual_format) {
  if (source == nullptr || shape == nullptr || rank == nullptr || actual_format == nullptr) {
    return kAclnnParamNullptr;
  }
  if (const Status status = sim_note("aclnnNpuFormatCastCalculateSizeAndFormat")) return status;
  const DataType type =
      type_of_rows == kDataTypeUndefined ? source->type : static_cast<DataType>(type_of_rows);
  std::vector<std::int64_t> storage;
  if (const Status status = storage_of_cast(*source, format, type, &storage)) return status;
  *shape = new std::int64_t[storage.size()];
  std::copy(storage.begin(), storage.end(), *shape);
  *rank = storage.size();
  *actual_format = format;
  return kSuccess;
}

OPERATOR(NpuFormatCast, kFormatCast, (const aclTensor* source, aclTensor* destination), source,
         destination)

}  // namespace simulated_operators
