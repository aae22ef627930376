// Operators that move, fill and pick elements.
#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

const Kernel kCopy = {"Copy",
                      [](const Launch& launch) { map<1>(launch, [](auto x) { return x; }); },
                      check_broadcast};

const Kernel kFillScalar = {"FillScalar", [](const Launch& launch) {
                              map<0>(launch, [&] { return launch.attributes.front().real; });
                            }};

const Kernel kFillInteger = {"FillInteger", [](const Launch& launch) {
                               map_as<std::int64_t>(
                                   launch, [&] { return launch.attributes.front().integer(); },
                                   std::make_index_sequence<0>());
                             }};

const Kernel& fill(const aclScalar* value) {
  return value != nullptr && value->is_real ? kFillScalar : kFillInteger;
}

const Kernel kArange = {"Arange", [](const Launch& launch) {
                          std::int64_t i = 0;
                          map<0>(launch, [&] {
                            const double step = launch.attributes.at(2).real;
                            return launch.attributes.front().real + static_cast<double>(i++) * step;
                          });
                        }};

// A dimension counted from the end, as a parameter, from the front. Throws std::invalid_argument
// where there is none.
std::int64_t dimension(std::int64_t dim, std::int64_t rank) {
  const std::int64_t wrapped = dim < 0 ? dim + rank : dim;
  if (wrapped < 0 || wrapped >= std::max<std::int64_t>(rank, 1)) {
    throw std::invalid_argument("a dimension that the tensor does not have");
  }
  return wrapped;
}

void copy_elements(const Operand& from, const Operand& to) {
  Launch copy;
  copy.operands = {from, to};
  kCopy.compute(copy);
}

// Operands: the tensors to join, then the result. Tensors of shape (0) are left out.
void concatenate(const Launch& launch) {
  const Operand& output = launch.operands.back();
  const std::int64_t dim = dimension(launch.attributes.front().integer(), output.rank);
  std::int64_t at = 0;
  for (std::size_t i = 0; i + 1 < launch.operands.size(); ++i) {
    const Operand& input = launch.operands[i];
    if (input.rank == 1 && input.shape[0] == 0) continue;
    Operand part = output;
    part.shape[dim] = input.shape[dim];
    part.data += at * output.strides[dim] * element_bytes(output.type);
    at += input.shape[dim];
    if (at > output.shape[dim]) throw std::runtime_error("more to join than the result holds");
    copy_elements(input, part);
  }
}
const Kernel kCat = {"Cat", concatenate};

std::int64_t index_at(const Operand& indices, const std::int64_t* position, std::int64_t extent) {
  std::int64_t offset = 0;
  for (std::int64_t dim = 0; dim < indices.rank; ++dim) {
    offset += position[dim] * indices.strides[dim];
  }
  std::int64_t index =
      loader<std::int64_t>(indices.type)(indices.data + offset * element_bytes(indices.type));
  if (index < 0) index += extent;
  if (index < 0 || index >= extent) throw std::runtime_error("an index that is out of range");
  return index;
}

// Row-major position of the n-th element.
void position_of(std::int64_t n, const Operand& shape, std::int64_t* position) {
  for (std::int64_t dim = shape.rank; dim-- > 0; n /= shape.shape[dim]) {
    position[dim] = n % shape.shape[dim];
  }
}

// Operands: the tensor, indices, the result, where the index stands for dimension `dim`: one index
// for every slice of the result, whose dimensions from there are those of `indices`.
void select_slices(const Launch& launch, std::int64_t dim) {
  const Operand& self = launch.operands.at(0);
  const Operand& indices = launch.operands.at(1);
  const Operand& output = launch.operands.at(2);
  const std::int64_t n_indices = indices.n_elements();
  for (std::int64_t n = 0; n < n_indices; ++n) {
    std::int64_t position[kMaxRank] = {};
    position_of(n, indices, position);
    const std::int64_t index = index_at(indices, position, self.shape[dim]);
    Operand from = self;
    from.data += index * self.strides[dim] * element_bytes(self.type);
    from.shape[dim] = 1;
    Operand to = output;
    to.rank = self.rank;
    for (std::int64_t d = 0; d < indices.rank; ++d) {
      to.data += position[d] * output.strides[dim + d] * element_bytes(output.type);
    }
    for (std::int64_t d = dim + 1; d < self.rank; ++d) {
      to.shape[d] = output.shape[d + indices.rank - 1];
      to.strides[d] = output.strides[d + indices.rank - 1];
    }
    to.shape[dim] = 1;
    copy_elements(from, to);
  }
}

const Kernel kEmbedding = {"Embedding", [](const Launch& launch) { select_slices(launch, 0); }};
const Kernel kIndexSelect = {"IndexSelect", [](const Launch& launch) {
                               select_slices(launch, dimension(launch.attributes.front().integer(),
                                                               launch.operands.front().rank));
                             }};

// Operands: the tensor, an index for every element of the result, the result.
void gather(const Launch& launch) {
  const Operand& self = launch.operands.at(0);
  const Operand& indices = launch.operands.at(1);
  const Operand& output = launch.operands.at(2);
  const std::int64_t dim = dimension(launch.attributes.front().integer(), self.rank);
  const std::int64_t n_elements = output.n_elements();
  const auto load_element = loader<double>(self.type);
  const auto store_element = storer<double>(output.type);
  for (std::int64_t n = 0; n < n_elements; ++n) {
    std::int64_t position[kMaxRank] = {};
    position_of(n, output, position);
    std::int64_t to = 0;
    for (std::int64_t d = 0; d < output.rank; ++d) to += position[d] * output.strides[d];
    position[dim] = index_at(indices, position, self.shape[dim]);
    std::int64_t from = 0;
    for (std::int64_t d = 0; d < self.rank; ++d) from += position[d] * self.strides[d];
    store_element(output.data + to * element_bytes(output.type),
                  load_element(self.data + from * element_bytes(self.type)));
  }
}
const Kernel kGather = {"Gather", gather};

// Keeps what `keeps(column - row)` says of the last two dimensions; the rest becomes zero.
template <class Keeps>
void keep_triangle(const Launch& launch, const Keeps& keeps) {
  const Operand& output = launch.operands.at(1);
  std::int64_t n = 0;
  map<1>(launch, [&](auto x) {
    std::int64_t position[kMaxRank] = {};
    position_of(n++, output, position);
    return keeps(position[output.rank - 1] - position[output.rank - 2]) ? x : decltype(x){};
  });
}
const Kernel kTril = {"Tril",
                      [](const Launch& launch) {
                        keep_triangle(launch, [&](std::int64_t above) {
                          return above <= launch.attributes.front().integer();
                        });
                      },
                      check_broadcast};
const Kernel kTriu = {"Triu",
                      [](const Launch& launch) {
                        keep_triangle(launch, [&](std::int64_t above) {
                          return above >= launch.attributes.front().integer();
                        });
                      },
                      check_broadcast};

}  // namespace

OPERATOR(InplaceCopy, kCopy, (aclTensor * self, const aclTensor* source), source, self)
OPERATOR(Cast, kCopy, (const aclTensor* self, DataType, aclTensor* out), self, out)
OPERATOR(InplaceFillScalar, fill(value), (aclTensor * self, const aclScalar* value), value, self)
OPERATOR(InplaceFillTensor, kCopy, (aclTensor * self, const aclTensor* value), value, self)
OPERATOR(InplaceZero, kFillInteger, (aclTensor * self), 0, self)
OPERATOR(InplaceOne, kFillInteger, (aclTensor * self), 1, self)
OPERATOR(Arange, kArange,
         (const aclScalar* start, const aclScalar* end, const aclScalar* step, aclTensor* out),
         start, end, step, out)
OPERATOR(Cat, kCat, (const aclTensorList* tensors, std::int64_t dim, aclTensor* out), tensors, dim,
         out)
OPERATOR(Embedding, kEmbedding, (const aclTensor* weight, const aclTensor* indices, aclTensor* out),
         weight, indices, out)
OPERATOR(IndexSelect, kIndexSelect,
         (const aclTensor* self, std::int64_t dim, const aclTensor* index, aclTensor* out), self,
         dim, index, out)
OPERATOR(Gather, kGather,
         (const aclTensor* self, std::int64_t dim, const aclTensor* index, aclTensor* out), self,
         dim, index, out)
OPERATOR(Tril, kTril, (const aclTensor* self, std::int64_t diagonal, aclTensor* out), self,
         diagonal, out)
OPERATOR(Triu, kTriu, (const aclTensor* self, std::int64_t diagonal, aclTensor* out), self,
         diagonal, out)

}  // namespace simulated_operators
