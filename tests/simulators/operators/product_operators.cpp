// Operators that multiply matrices. Each packs its second matrix into a workspace first, so that
// the operators need a workspace as the device's do. Those for weights take it in fractals.
#include <vector>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

// One matrix of a batch.
struct Matrix {
  char* data;
  DataType type;
  std::int64_t n_rows, n_columns;
  std::int64_t row_stride, column_stride;  // in elements
  std::int64_t item_bytes;
  Fractals fractals;

  char* at(std::int64_t row, std::int64_t column) const {
    const std::int64_t offset = row * row_stride + column * column_stride;
    return data + (fractals.is_used() ? fractals.place(offset) : offset) * item_bytes;
  }
};

// The last two dimensions of `operand`, at `offset_bytes`. A vector is a row of the left factor and
// of the result, a column of the right factor.
Matrix matrix_of(const Operand& operand, std::int64_t offset_bytes, bool is_column) {
  const std::int64_t size = element_bytes(operand.type);
  char* const data = operand.data + offset_bytes;
  if (operand.rank == 0) return {data, operand.type, 1, 1, 0, 0, size, {}};
  const std::int64_t last = operand.rank - 1;
  const std::int64_t n = operand.shape[last];
  const std::int64_t stride = operand.strides[last];
  if (operand.rank > 1) {
    const std::int64_t n_rows = operand.shape[last - 1], row_stride = operand.strides[last - 1];
    return {data, operand.type, n_rows, n, row_stride, stride, size, operand.fractals};
  }
  if (is_column) return {data, operand.type, n, 1, stride, 0, size, {}};
  return {data, operand.type, 1, n, 0, stride, size, {}};
}

// Only the dimensions of the batch.
Operand batch_of(const Operand& operand) {
  Operand batch = operand;
  batch.rank = std::max<std::int64_t>(operand.rank - 2, 0);
  return batch;
}

// result = alpha * left @ right + beta * result, in single precision, accumulated in doubles.
void multiply(const Matrix& left, const Matrix& right, const Matrix& result, double alpha,
              double beta, float* packed) {
  if (left.n_columns != right.n_rows ||
      left.n_rows * right.n_columns != result.n_rows * result.n_columns) {
    throw std::runtime_error("matrices that do not fit");
  }
  const auto load_left = loader<float>(left.type);
  const auto load_right = loader<float>(right.type);
  for (std::int64_t k = 0; k < right.n_rows; ++k) {
    for (std::int64_t j = 0; j < right.n_columns; ++j) {
      packed[k * right.n_columns + j] = load_right(right.at(k, j));
    }
  }
  const auto load_result = loader<double>(result.type);
  const auto store_result = storer<double>(result.type);
  std::vector<double> sums(static_cast<std::size_t>(right.n_columns));
  for (std::int64_t i = 0; i < left.n_rows; ++i) {
    std::fill(sums.begin(), sums.end(), 0);
    for (std::int64_t k = 0; k < right.n_rows; ++k) {
      const double factor = load_left(left.at(i, k));
      const float* const row = packed + k * right.n_columns;
      for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += factor * row[j];
    }
    for (std::int64_t j = 0; j < right.n_columns; ++j) {
      // A row of a result without columns' or rows' dimension is still stored in order.
      char* const to = result.n_rows == left.n_rows ? result.at(i, j) : result.at(j, i);
      const double before = beta == 0 ? 0 : beta * load_result(to);
      store_result(to, alpha * sums[static_cast<std::size_t>(j)] + before);
    }
  }
}

// Operands `first` and the next two: left, right, result.
void batched_product(const Launch& launch, std::size_t first, double alpha, double beta) {
  const Operand& left = launch.operands.at(first);
  const Operand& right = launch.operands.at(first + 1);
  const Operand& result = launch.operands.at(first + 2);
  Operand batch = batch_of(left.rank >= right.rank ? left : right);
  for (std::int64_t dim = 0; dim < batch.rank; ++dim) batch.shape[dim] = result.shape[dim];
  Operand result_batch = batch_of(result);
  if (result.rank < batch.rank) throw std::runtime_error("a result of too few dimensions");
  result_batch.rank = batch.rank;
  const std::array<std::array<std::int64_t, kMaxRank>, 3> strides = {
      broadcast_strides(batch_of(left), batch), broadcast_strides(batch_of(right), batch),
      broadcast_strides(result_batch, batch)};
  auto* const packed = reinterpret_cast<float*>(launch.workspace);
  walk(batch, strides, [&](const Offsets<3>& offsets) {
    Operand matrix_result = result;
    if (result.rank > batch.rank + 2) throw std::runtime_error("a result of too many dimensions");
    matrix_result.rank = result.rank - batch.rank;
    for (std::int64_t dim = 0; dim < matrix_result.rank; ++dim) {
      matrix_result.shape[dim] = result.shape[batch.rank + dim];
      matrix_result.strides[dim] = result.strides[batch.rank + dim];
    }
    multiply(matrix_of(left, offsets[0], false), matrix_of(right, offsets[1], true),
             matrix_of(matrix_result, offsets[2], right.rank == 1), alpha, beta, packed);
  });
}

std::size_t packed_bytes(const Operand& right) {
  const Matrix matrix = matrix_of(right, 0, true);
  return static_cast<std::size_t>(matrix.n_rows * matrix.n_columns) * sizeof(float);
}

const Kernel kProduct = {"MatMul", [](const Launch& launch) { batched_product(launch, 0, 1, 0); },
                         nullptr,
                         [](const Launch& launch) { return packed_bytes(launch.operands.at(1)); }};

// Operands: addend, left, right, result. Attributes: beta, alpha.
void add_product(const Launch& launch) {
  Launch copy;
  copy.operands = {launch.operands.at(0), launch.operands.at(3)};
  map<1>(copy, [](auto x) { return x; });
  batched_product(launch, 1, value_of<double>(launch.attributes.at(1)),
                  value_of<double>(launch.attributes.at(0)));
}

const Kernel kAddProduct = {"AddMatMul", add_product, nullptr, [](const Launch& launch) {
                              return packed_bytes(launch.operands.at(2));
                            }};

// Throws std::invalid_argument unless only the right factor, the operand after `left`, is in
// fractals, and all hold 16-bit numbers, as the documentation of these operators says.
void check_weight(const Launch& launch, std::size_t left) {
  for (std::size_t i = 0; i < launch.operands.size(); ++i) {
    const Operand& operand = launch.operands[i];
    if (operand.fractals.is_used() != (i == left + 1)) {
      throw std::invalid_argument("a format that the operator does not take there");
    }
    if (operand.type != kFloat16 && operand.type != kBfloat16) {
      throw std::invalid_argument("a type that the operator does not take");
    }
  }
}

const Kernel kWeightProduct = {"MatMulWeightNz",
                               kProduct.compute,
                               [](const Launch& launch) { check_weight(launch, 0); },
                               kProduct.workspace_bytes,
                               false,
                               true};
const Kernel kAddWeightProduct = {"AddMatMulWeightNz",
                                  kAddProduct.compute,
                                  [](const Launch& launch) { check_weight(launch, 1); },
                                  kAddProduct.workspace_bytes,
                                  false,
                                  true};

}  // namespace

#define PRODUCT(name, kernel)                                                                  \
  OPERATOR(name, kernel,                                                                       \
           (const aclTensor* self, const aclTensor* other, aclTensor* out, std::int8_t), self, \
           other, out)
#define ADD_PRODUCT(name, kernel)                                                        \
  OPERATOR(name, kernel,                                                                 \
           (const aclTensor* self, const aclTensor* left, const aclTensor* right,        \
            const aclScalar* beta, const aclScalar* alpha, aclTensor* out, std::int8_t), \
           self, left, right, beta, alpha, out)

OPERATOR(Dot, kProduct, (const aclTensor* self, const aclTensor* other, aclTensor* out), self,
         other, out)
PRODUCT(Mm, kProduct)
PRODUCT(Matmul, kProduct)
PRODUCT(BatchMatMul, kProduct)
PRODUCT(MatmulWeightNz, kWeightProduct)
ADD_PRODUCT(Addmm, kAddProduct)
ADD_PRODUCT(Baddbmm, kAddProduct)
ADD_PRODUCT(AddmmWeightNz, kAddWeightProduct)

}  // namespace simulated_operators
