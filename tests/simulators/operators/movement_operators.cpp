// Operators that move, fill and pick elements.
#include <algorithm>
#include <cstring>

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

// Converts a dimension that may be counted from the end to one counted from the front. Throws
// std::invalid_argument if it does not exist.
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

// Operands: tensors of one shape, then the result, which has one dimension more.
void stack(const Launch& launch) {
  const Operand& output = launch.operands.back();
  const std::int64_t dim = dimension(launch.attributes.front().integer(), output.rank);
  for (std::size_t i = 0; i + 1 < launch.operands.size(); ++i) {
    Operand part = output;
    part.data += static_cast<std::int64_t>(i) * output.strides[dim] * element_bytes(output.type);
    part.rank = output.rank - 1;
    for (std::int64_t d = dim; d < part.rank; ++d) {
      part.shape[d] = output.shape[d + 1];
      part.strides[d] = output.strides[d + 1];
    }
    copy_elements(launch.operands[i], part);
  }
}
const Kernel kStack = {"Stack", stack};

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

// Operands: the tensor, indices, the result, in which the index replaces dimension `dim`: one index
// for every slice of the result, whose dimensions from there on are those of `indices`.
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
// An integer index of one dimension; a result of the tensor's type with as many slices.
void check_index_select(const Launch& launch) {
  const Operand& self = launch.operands.at(0);
  const Operand& index = launch.operands.at(1);
  const Operand& output = launch.operands.at(2);
  const std::int64_t dim = dimension(launch.attributes.front().integer(), self.rank);
  const bool fits = index.rank <= 1 && (index.type == kInt32 || index.type == kInt64) &&
                    output.type == self.type && output.rank == self.rank &&
                    (output.rank == 0 || output.shape[dim] == index.n_elements());
  if (!fits) throw std::invalid_argument("an index or a result that does not fit");
}

const Kernel kIndexSelect = {"IndexSelect",
                             [](const Launch& launch) {
                               select_slices(launch, dimension(launch.attributes.front().integer(),
                                                               launch.operands.front().rank));
                             },
                             check_index_select};

// Copies to every element of `output` the element of `self` at `find(position)`. Both hold elements
// of one type.
template <class Find>
void pick_elements(const Operand& self, const Operand& output, const Find& find) {
  if (self.type != output.type) throw std::runtime_error("a result of another type");
  const std::int64_t size = element_bytes(self.type);
  const std::int64_t n_elements = output.n_elements();
  for (std::int64_t n = 0; n < n_elements; ++n) {
    std::int64_t position[kMaxRank] = {};
    position_of(n, output, position);
    std::int64_t to = 0, from = 0;
    for (std::int64_t dim = 0; dim < output.rank; ++dim) to += position[dim] * output.strides[dim];
    find(position);
    for (std::int64_t dim = 0; dim < self.rank; ++dim) from += position[dim] * self.strides[dim];
    std::memcpy(output.data + to * size, self.data + from * size, static_cast<std::size_t>(size));
  }
}

// Operands: the tensor, an index for every element of the result, the result.
const Kernel kGather = {
    "Gather", [](const Launch& launch) {
      const Operand& self = launch.operands.at(0);
      const std::int64_t dim = dimension(launch.attributes.front().integer(), self.rank);
      pick_elements(self, launch.operands.at(2), [&](std::int64_t* position) {
        position[dim] = index_at(launch.operands.at(1), position, self.shape[dim]);
      });
    }};

// Attribute: the dimensions that are reversed.
const Kernel kFlip = {"Flip", [](const Launch& launch) {
                        const Operand& self = launch.operands.at(0);
                        pick_elements(self, launch.operands.at(1), [&](std::int64_t* position) {
                          for (const std::int64_t d : launch.attributes.front().integers) {
                            const std::int64_t dim = dimension(d, self.rank);
                            position[dim] = self.shape[dim] - 1 - position[dim];
                          }
                        });
                      }};

const Kernel kRepeat = {"Repeat", [](const Launch& launch) {
                          const Operand& self = launch.operands.at(0);
                          const Operand& output = launch.operands.at(1);
                          const std::int64_t n_new = output.rank - self.rank;
                          pick_elements(self, output, [&](std::int64_t* position) {
                            for (std::int64_t dim = 0; dim < self.rank; ++dim) {
                              position[dim] = position[dim + n_new] % self.shape[dim];
                            }
                          });
                        }};

// Operands: the tensor, one tensor of indices for each of its first dimensions, the result. All
// index tensors broadcast to each other, and come before the dimensions that are not indexed.
void index(const Launch& launch) {
  const Operand& self = launch.operands.front();
  const Operand& output = launch.operands.back();
  const auto n_indexed = static_cast<std::int64_t>(launch.operands.size()) - 2;
  const std::int64_t n_kept = self.rank - n_indexed;
  Operand shape = output;  // of the indices
  shape.rank = output.rank - n_kept;
  pick_elements(self, output, [&](std::int64_t* position) {
    std::int64_t found[kMaxRank] = {};
    for (std::int64_t dim = 0; dim < n_indexed; ++dim) {
      Operand indices = launch.operands[static_cast<std::size_t>(1 + dim)];
      const auto strides = broadcast_strides(indices, shape);
      indices.rank = shape.rank;
      for (std::int64_t d = 0; d < shape.rank; ++d) {
        indices.strides[d] = strides[static_cast<std::size_t>(d)] / element_bytes(indices.type);
      }
      found[dim] = index_at(indices, position, self.shape[dim]);
    }
    for (std::int64_t dim = 0; dim < n_kept; ++dim) {
      found[n_indexed + dim] = position[shape.rank + dim];
    }
    std::copy(found, found + self.rank, position);
  });
}

// Omitted dimensions have empty indices: simulated only after the indexed dimensions.
void check_index(const Launch& launch) {
  for (std::size_t i = 1; i + 1 < launch.operands.size(); ++i) {
    const Operand& indices = launch.operands[i];
    if (indices.rank == 1 && indices.shape[0] == 0 && launch.operands.back().n_elements() > 0) {
      throw std::invalid_argument("a dimension that is not indexed before one that is");
    }
  }
}
const Kernel kIndex = {"Index", index, check_index};

const Kernel kEye = {"Eye", [](const Launch& launch) {
                       const Operand& output = launch.operands.front();
                       std::int64_t n = 0;
                       map<0>(launch, [&] {
                         std::int64_t position[kMaxRank] = {};
                         position_of(n++, output, position);
                         return position[0] == position[1] ? 1 : 0;
                       });
                     }};

// Keeps elements for which `keeps(column - row)` holds in the last two dimensions; the rest becomes
// zero.
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
OPERATOR(Stack, kStack, (const aclTensorList* tensors, std::int64_t dim, aclTensor* out), tensors,
         dim, out)
OPERATOR(Eye, kEye, (std::int64_t, std::int64_t, aclTensor* out), out)
OPERATOR(Flip, kFlip, (const aclTensor* self, const aclIntArray* dims, aclTensor* out), self, dims,
         out)
OPERATOR(Repeat, kRepeat, (const aclTensor* self, const aclIntArray* repeats, aclTensor* out), self,
         repeats, out)
OPERATOR(Index, kIndex, (const aclTensor* self, const aclTensorList* indices, aclTensor* out), self,
         indices, out)
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
