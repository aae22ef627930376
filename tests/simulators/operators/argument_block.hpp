// The argument block of an operator's kernel, as on the device: addresses first, then tiling data
// in the same block, to which the block's first word points.
//
//   words 0                     address of the tiling data: points into the block itself
//   words 1 .. n                address of each operand's first element; 0: not given
//   word  n + 1                 address of the workspace
//   then  the tiling data       words: check sum of the rest; a number that looks like an address;
//                               counts; per operand type, rank, shape, strides, fractals; the
//                               attributes
//
// The number that resembles an address is none: a relocation must leave it unchanged. The kernel
// sums the tiling data and fails if a word was changed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "descriptions.hpp"

namespace simulated_operators {

inline constexpr std::int64_t kMaxRank = 8;

// The layout of matrices in FRACTAL_NZ, the device's format for them: cut into fractals of 16 rows
// and some columns. A fractal is stored row by row, then the fractal below it, then the next column
// of fractals: [columns / fractal_columns, rows / 16, 16, fractal_columns], rounded up, with zeros
// beyond the matrix. (The documentation of the format: 32 bytes to a row of a fractal.)
struct Fractals {
  std::int64_t fractal_columns = 0;  // 0: the operand's layout is its shape and strides
  std::int64_t padded_rows = 0;
  std::int64_t n_columns = 0;  // of the matrix

  bool is_used() const { return fractal_columns > 0; }
  // The position of the element at row-major `offset` of the matrix; both in elements.
  std::int64_t place(std::int64_t offset) const {
    const std::int64_t row = offset / n_columns, column = offset % n_columns;
    const std::int64_t fractal = column / fractal_columns;
    return (fractal * padded_rows + row) * fractal_columns + column % fractal_columns;
  }
  // Of one matrix, with its padding.
  std::int64_t n_elements() const {
    const std::int64_t n_across = (n_columns + fractal_columns - 1) / fractal_columns;
    return n_across * padded_rows * fractal_columns;
  }
};

struct Operand {
  char* data = nullptr;                // null also where it has no elements
  DataType type = kDataTypeUndefined;  // undefined: not given
  std::int64_t rank = 0;
  std::int64_t shape[kMaxRank] = {};
  // In elements. In fractals the last two are those of the matrix in row-major order, the others
  // count the padding of matrices.
  std::int64_t strides[kMaxRank] = {};
  Fractals fractals;

  bool is_given() const { return type != kDataTypeUndefined; }
  std::int64_t n_elements() const;
};

struct Attribute {
  bool is_real = false;
  std::vector<std::int64_t> integers;  // several for an array, none for one that is not given
  double real = 0;                     // the first integer as a number, or the real itself

  std::int64_t integer() const { return integers.empty() ? 0 : integers.front(); }
};

// The work of a kernel.
struct Launch {
  std::vector<Operand> operands;  // in the order of the operator's parameters
  std::vector<Attribute> attributes;
  char* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

// The block of this launch, in host memory; `tiling_offset_bytes` is where its first word will
// point.
std::vector<std::uint64_t> encode(const Launch& launch, std::size_t* tiling_offset_bytes);

// Reads a block in device memory. Throws std::runtime_error where the tiling data differs from what
// was encoded.
Launch decode(const void* block, std::size_t n_bytes);

// Sets the number in the tiling data that resembles an address. By default: the first address
// encoded in this process.
void set_look_alike(std::uint64_t number);

// Blocks of launches with this many operands end with an uninitialised word, different in each
// block. 0: none do.
void set_padded(std::uint64_t n_operands);

}  // namespace simulated_operators
