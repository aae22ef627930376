// The objects behind the runtime's handles: contexts, streams, events, binaries, functions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../device/device.hpp"
#include "ascend/acl_abi.hpp"

namespace simulated_ascend {

using namespace offload::acl;

struct StreamState;
struct ModelState;
struct ModelStream;
struct Capture;
struct Task;
struct GroupUpdate;
struct ConditionState;

struct ContextState {
  std::uint64_t handle = 0;
  int device = 0;
  bool is_primary = false;
  std::shared_ptr<StreamState> default_stream;
};

struct StreamState {
  std::uint64_t handle = 0;  // the queue's
  std::shared_ptr<simulator::Stream> queue;
  std::weak_ptr<ContextState> context;
  int id = 0;
  std::uint32_t flags = 0, priority = 0;
  std::map<int, StreamAttributeValue> attributes;
  std::shared_ptr<Capture> capture;  // while it captures
  std::weak_ptr<ModelState> model;   // it is bound to, or was made for
  std::weak_ptr<ModelStream> part;   // of that model
  std::shared_ptr<GroupUpdate> update;
};

// How much of each stream of a capture precedes some place in it.
using Progress = std::map<const ModelStream*, std::size_t>;

struct EventState {
  std::uint64_t handle = 0;
  std::uint32_t id = 0, flags = 0;
  bool is_pooled = false;
  bool is_default = false;                     // of aclrtCreateEvent
  std::shared_ptr<simulator::Mark> mark;       // of its latest record; null: never recorded
  std::shared_ptr<simulator::Mark> last_wait;  // where a stream waited for it
  bool is_set = false;                         // on the device: read by external waits
  std::int64_t set_ns = 0;                     // when it was last set, by the virtual clock
  // The model in which it was last recorded, if in a capture.
  std::weak_ptr<ModelState> captured_in;
  std::weak_ptr<Task> record;
  Progress progress;

  bool is_external() const { return (flags & kEventExternal) != 0; }
};

struct FunctionState {
  std::uint64_t handle = 0;
  std::uint64_t binary = 0;
  std::string name;
  simulator::BlockFunction function = nullptr;
  void* user = nullptr;
  std::size_t argument_bytes = 0;
};

struct BinaryState {  // loaded
  std::uint64_t handle = 0;
  std::vector<std::shared_ptr<FunctionState>> functions;
};

struct ImageState {  // made by aclrtCreateBinary, which keeps the caller's pointer
  std::uint64_t handle = 0;
  const void* data = nullptr;
  std::size_t n_bytes = 0;
};

// Blocks of device memory that the runtime owns: the arguments of kernels. Poisoned and reused when
// they are freed. Owner: the runtime. Thread: under the device's mutex.
class ArgumentPool {
 public:
  explicit ArgumentPool(simulator::Memory& memory) : memory_(memory) {}

  // Errors: kOutOfMemory.
  std::uint64_t allocate(std::size_t n_bytes);
  void free(std::uint64_t address, std::size_t n_bytes);
  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t n_live() const { return n_live_; }
  // The device memory that the pool took.
  std::size_t slab_bytes() const { return slab_bytes_; }
  // Forgets everything, as the memory itself was reset. Blocks that are freed later are ignored.
  void reset();

 private:
  simulator::Memory& memory_;
  std::multimap<std::size_t, std::uint64_t> free_;
  std::map<std::uint64_t, std::size_t> live_;
  std::uint64_t slab_ = 0;
  std::size_t left_bytes_ = 0, slab_bytes_ = 0, live_bytes_ = 0, n_live_ = 0;
};

// One block of the pool, freed with its last owner.
struct ArgumentBlock {
  ArgumentBlock(ArgumentPool& from, std::size_t n);
  ~ArgumentBlock();
  ArgumentBlock(const ArgumentBlock&) = delete;
  ArgumentBlock& operator=(const ArgumentBlock&) = delete;

  ArgumentPool& pool;
  const std::size_t n_bytes;
  const std::uint64_t address;
};

}  // namespace simulated_ascend
