// The simulator's offline models, which stand in for .om files. Little endian, in this order:
//
//   FileHeader
//   FileTensor[n_inputs], FileTensor[n_outputs]
//   FileKernel[n_kernels]
//   n_tasks times: FileTask, then FileOperand[n_operands]
//   weight_bytes bytes: the content of the weights
//
// A task runs a kernel whose argument block is one word for each operand: the address of its region
// plus the offset. Regions are the feature map (work), the weights, an input, an output, or none:
// then the word is the offset itself. `function` is an address in this process, so only the process
// that wrote such a file can use it.
#pragma once

#include <cstdint>

namespace simulated_ascend {

inline constexpr char kOfflineMagic[] = "SIMMODL1";
inline constexpr std::uint64_t kMaxFileDimensions = 8;

struct FileHeader {
  char magic[8];
  std::uint64_t work_bytes, weight_bytes;
  std::uint64_t n_inputs, n_outputs, n_kernels, n_tasks;
};
static_assert(sizeof(FileHeader) == 56);

struct FileTensor {
  char name[64];
  std::int32_t data_type, format;  // aclDataType, aclFormat
  std::uint64_t n_bytes, n_dimensions;
  std::int64_t dimensions[kMaxFileDimensions];
};
static_assert(sizeof(FileTensor) == 152);

struct FileKernel {
  char name[48];
  std::uint64_t function, user;  // a simulator::BlockFunction
};
static_assert(sizeof(FileKernel) == 64);

struct FileTask {
  std::uint64_t kernel, n_blocks, n_operands;
};
static_assert(sizeof(FileTask) == 24);

enum class Region : std::uint64_t { kWork, kWeight, kInput, kOutput, kNone };

struct FileOperand {
  Region region;
  std::uint64_t index;  // of an input or output; else 0
  std::uint64_t offset_bytes;
};
static_assert(sizeof(FileOperand) == 24);

}  // namespace simulated_ascend
