// Sizes that vary: what they make of a resident program, and who may be told so.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "offload/expressions.hpp"
#include "offload/fence.hpp"

namespace offload {

// A number that an expression gives: of a tensor by position, its sizes first, then its strides,
// and last its offset in bytes.
struct VaryingNumber {
  std::uint32_t position = 0;
  std::uint32_t expression = 0;
};

// Where Values lie in the feature map, for all sizes of a range.
struct SizedPlaces {
  std::vector<std::int64_t> offsets_bytes;  // by Value; 0 of those that lie elsewhere
  std::vector<std::size_t> rooms_bytes;     // by Value: the most that it may have
  std::size_t feature_map_bytes = 0;
  std::size_t number = 0;  // no two of one executable have the same
};

// What a resident keeps with the numbers of one choice of sizes, such as arguments of kernels.
//
// Owner: the SizedProgram, and the resident while it executes with it. Thread: that of executions.
struct SizedWork {
  virtual ~SizedWork() = default;
  std::size_t size_bytes = 0;  // the most that it takes
};

// A program's numbers at one choice of sizes.
struct SizedProgram {
  std::vector<Number> numbers;            // by expression
  std::vector<std::size_t> values_bytes;  // by Value
  std::shared_ptr<const SizedPlaces> places;
  std::vector<c10::Storage> constants;  // what follows from sizes alone, in the resident's order
  // Where a device makes these: the stream, and the end of that work.
  std::optional<c10::Stream> constants_stream;
  std::shared_ptr<Fence> constants_end;
  std::shared_ptr<SizedWork> work;  // the resident's own; null: it keeps nothing
};

// How the sizes of an execution were come by.
struct SizesFound {
  bool was_ready = false;        // they were kept
  std::uint64_t prepare_ns = 0;  // else: what making them ready took
};

// The role of a resident whose sizes vary. Between two executions all its tensors, and what its
// launches are given besides, become those of other sizes.
//
// Owner, thread: as Resident, and as its methods. Errors: check throws ExpressionError where a
// tensor would reach beyond its Value, or have a size below 0; resize throws std::bad_alloc alone.
class SizeChanges {
 public:
  // Whether the program can be executed with these numbers. Any thread, at any time.
  virtual void check(const SizedProgram& sizes) const = 0;

  // Takes these numbers, which were checked, for the executions from now on; they must live until
  // others are taken. Called before patch.
  virtual void resize(const SizedProgram& sizes) = 0;

  // What the resident keeps with these numbers, which were checked; `sizes` by Dim. Any thread, at
  // any time. Throws std::bad_alloc alone.
  virtual std::shared_ptr<SizedWork> work_of(const std::vector<std::int64_t>& sizes) const {
    static_cast<void>(sizes);
    return nullptr;
  }

 protected:
  ~SizeChanges() = default;
};

}  // namespace offload
