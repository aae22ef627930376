// Work of the device: the same on a stream, in a graph and in a running graph.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "status.hpp"

namespace simulator {

struct Parameter {
  std::size_t offset_bytes;
  std::size_t n_bytes;
};

// Called when the work runs, on the thread that waits for it; a nonzero result: the kernel failed.
using KernelFunction = int (*)(const void* arguments, void* user);

// A host function in place of a kernel. Owner: the device; kept by the work that runs it.
struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::size_t packed_bytes = 0;
  KernelFunction function = nullptr;
  void* user = nullptr;
  // Its work before it waits for the kernel that it may overlap; null: nothing.
  KernelFunction prologue = nullptr;
  void* prologue_user = nullptr;
  bool is_loaded = true;  // its code is on the device
  // Dynamic shared memory that a launch may ask for; a function may be given more.
  unsigned int most_shared_bytes = 48 << 10;
  std::uint64_t handle = 0;          // of a function
  std::uint64_t library_handle = 0;  // of the kernel, which belongs to no context
};

// Lays parameters out as a C compiler would a struct. Parameters come without types: each is
// aligned to the largest power of two, at most 8, that divides its size.
void lay_out(Kernel& kernel, const std::size_t* sizes, std::size_t count);

struct Dimensions {
  unsigned int x = 1, y = 1, z = 1;
};

// The grid of the kernel whose function runs on this thread, or ran last.
Dimensions running_grid();

using AttributeValue = std::array<unsigned char, 64>;

struct KernelCall {
  std::shared_ptr<const Kernel> kernel;
  bool by_library_handle = false;
  Dimensions grid, block;
  unsigned int shared_bytes = 0;
  std::vector<unsigned char> arguments;  // packed, copied at the call
  bool packed = false;                   // as the caller gave them
  std::map<int, AttributeValue> attributes;
  bool overlaps = false;             // it may begin before the preceding kernel in its stream ended
  bool is_prologue = false;          // only the work before its wait
  bool is_without_prologue = false;  // only the work after its wait
};

enum class Side { kHost, kDevice, kUnified };

// Up to three dimensions at an address: the distances of lines in bytes and of planes in lines.
struct Operand {
  Side side = Side::kDevice;
  std::uint64_t address = 0;
  std::size_t x_bytes = 0, y = 0, z = 0;
  std::size_t pitch_bytes = 0, height = 0;

  std::uint64_t at(std::size_t line, std::size_t plane) const {
    return address + x_bytes + (y + line) * pitch_bytes + (z + plane) * height * pitch_bytes;
  }
};

struct Copy {
  Operand source, destination;
  std::size_t width_bytes = 0, height = 1, depth = 1;
  // The source's bytes, line after line, where they were read at the call.
  std::vector<unsigned char> staged;
};

struct Fill {
  std::uint64_t destination = 0;
  std::size_t pitch_bytes = 0;
  unsigned int value = 0;
  unsigned int element_bytes = 1;
  std::size_t width = 0;  // elements
  std::size_t height = 1;
};

struct HostCall {
  void (*function)(void*) = nullptr;
  void* user = nullptr;
};

struct GraphRun;

// A graph that runs as one node of another.
struct ChildGraph {
  std::shared_ptr<const GraphRun> run;
};

// Called when the work runs, on the thread that waits for it; a nonzero result: the kernel failed.
using BlockFunction = int (*)(const void* arguments, std::size_t argument_bytes,
                              std::uint32_t n_blocks, void* user);

// A kernel whose arguments lie in device memory, where they are read when it runs.
struct BlockKernelCall {
  BlockFunction function = nullptr;
  void* user = nullptr;
  std::uint64_t arguments = 0;
  std::size_t argument_bytes = 0;
  std::uint32_t n_blocks = 1;
};

class Runner;

// Work that is known only when it runs: it is read from memory, or changed by other work. `run` is
// called under the device's mutex. Its captured objects live until then.
struct LateWork {
  std::function<void(Runner&)> run;
};

// In a graph: an event happens when the node's dependencies have ended.
struct EventRecord {
  std::uint64_t event = 0;
};

using Work = std::variant<KernelCall, Copy, Fill, HostCall, ChildGraph, EventRecord,
                          BlockKernelCall, LateWork>;

// The interface for late work. Thread: the one that runs work, under the device's mutex.
class Runner {
 public:
  virtual void perform(const Work& work) = 0;
  // On the virtual clock: the end of the executed work of its stream.
  virtual std::int64_t stream_ns() const = 0;
  // The device fails permanently.
  virtual void fail(Status status) = 0;

 protected:
  ~Runner() = default;
};

// The bytes from the first touched byte to one past the last.
std::size_t span_bytes(const Operand& operand, const Copy& copy);
std::size_t span_bytes(const Fill& fill);

// Moves the bytes. Addresses were checked before.
void run(const Copy& copy);
void run(const Fill& fill);

}  // namespace simulator
