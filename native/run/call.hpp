// Tensors of a call: inputs and results checked against the recorded shapes, and their addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/sizes.hpp"
#include "run/drain.hpp"

namespace offload {

struct Instance;

// A strided tensor without memory.
struct TensorLayout {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool conjugate = false;
  bool negative = false;

  // Bytes from the first element to one past the last.
  std::size_t span_bytes() const;
};

// Whether a tensor of the layout's shape has its strides, ignoring unused ones: those of dimensions
// of one element, and of empty tensors. Kernels and torch's fake tensors set these differently.
bool same_strides(const at::Tensor& tensor, const TensorLayout& layout);

struct InputSpec {
  std::string name;
  std::size_t slot = 0;
  bool written = false;
  bool may_be_written = false;      // by unseen work: a copy is also copied back
  bool returned_as_view = false;    // the result aliases it, so a strided copy is no substitute
  std::size_t alignment_bytes = 1;  // copied if its address is not a multiple
  bool copied = false;              // always, into `buffer`, whose address is fixed
  bool on_host = false;             // a host constant: it has no slot
  at::Tensor buffer;                // made with the Replay

  bool takes_any_address() const { return alignment_bytes <= 1 && !copied; }
};

// An output's memory: allocated for each execution, or by the operator that makes it. If `copied`,
// the program writes `buffer`, whose address is fixed, and the result is a copy of it.
struct OutputSpec {
  std::string name;
  std::size_t slot = 0;
  bool operator_allocated = false;
  std::size_t alignment_bytes = 1;  // a given buffer whose address is not a multiple is copied to
  bool copied = false;              // never for an output that its operator allocates
  at::Tensor buffer;                // bytes, made with the Replay
};

enum class ResultSource : std::uint8_t { kInput, kWeight, kOutput };

// One tensor of the result: a view of an input, a weight or an output.
struct ResultSpec {
  ResultSource source = ResultSource::kOutput;
  std::size_t index = 0;     // of the input, weight or output
  bool is_argument = false;  // the caller's own tensor is returned
};

struct ResultShape {
  std::int64_t offset_bytes = 0;
  TensorLayout layout;
  bool covers_output = false;  // the only result on its output, covering it: `out=` binds in place
};

// What differs for other sizes of a call, where they may vary.
struct CallShapes {
  std::vector<TensorLayout> inputs;
  std::vector<std::size_t> outputs_bytes;
  std::vector<ResultShape> results;
  std::size_t feature_map_bytes = 0;
};

struct WeightSpec {
  std::string name;
  std::size_t slot = 0;
  std::size_t size_bytes = 0;
  bool written = false;
  std::vector<at::Tensor> holders;
  std::vector<TensorLayout> layouts;  // of each holder, as recorded
  std::vector<std::int64_t> offsets;  // of each holder in the storage, in elements
  bool packed = false;                // launches read what was derived from it
  at::Tensor moved;      // the copy that launches read; undefined: they read the holders' storage
  c10::Storage storage;  // that of the holders when they were bound

  // The memory that launches receive.
  const c10::Storage& place() const { return moved.defined() ? moved.storage() : storage; }
};

// A tensor on the host, zero-dimensional unless unseen code may read it: an input, or a tensor of
// the model. Launches of a device contain its value, so each execution must find the same value.
struct HostConstantSpec {
  std::string name;
  std::string content;               // the bytes that it spanned at the recording
  TensorLayout layout;               // as recorded
  std::optional<std::size_t> input;  // its index; no value: `holder`
  at::Tensor holder;                 // the tensor of the model
};

// Inputs that must overlap as recorded, since one is written.
struct OverlapSpec {
  std::size_t first = 0;
  std::size_t second = 0;
  std::int64_t distance_bytes = 0;
};

// A tensor in whose storage a weight lies.
struct WeightPlace {
  const c10::TensorImpl* tensor;
  std::size_t size_bytes;
  std::size_t weight;

  std::uint64_t address() const {
    return reinterpret_cast<std::uint64_t>(tensor->unsafe_storage().data());
  }
};

struct CallSpec {
  c10::Device device = c10::kCPU;
  std::vector<InputSpec> inputs;
  std::vector<OutputSpec> outputs;
  std::vector<ResultSpec> results;
  std::vector<WeightSpec> weights;  // on the device
  std::vector<HostConstantSpec> host_constants;
  std::vector<OverlapSpec> overlaps;
  std::size_t feature_map_slot = 0;
  std::size_t alignment_bytes = 64;
  CallShapes shapes;  // as recorded
  // Why weights cannot be rebound, and what to do instead; empty: they can.
  std::string rebinding_refusal;

  // Made with the Replay.
  bool has_writes = false;  // to an input or a weight
  std::vector<WeightPlace> weight_places;
  bool returns_weights = false;
  std::vector<std::size_t> written_weights;  // by number
};

// A copy that an execution makes because a tensor cannot be used in place.
struct Copy {
  at::Tensor from;
  at::Tensor to;
};

// The memory of a storage when a call was held.
struct HeldPlace {
  const c10::StorageImpl* storage = nullptr;  // null: no tensor was given
  const void* data = nullptr;
  std::size_t n_bytes = 0;
};

// The tensors of a call, usually few: a call allocates as little as possible.
using Tensors = c10::SmallVector<at::Tensor, 4>;

// The caller's tensors of a call that continues with separate tensor objects.
struct CallersTensors {
  Tensors inputs;
  Tensors given_results;
  std::vector<HeldPlace> places;  // of inputs, given results, feature map
};

// The tensors of one execution, from the check to the result. Keeps everything bound alive.
struct Call {
  std::shared_ptr<const Instance> instance;   // of its sizes, where they vary
  const CallShapes* shapes = nullptr;         // of the instance, or of the spec; set by bind_call
  std::vector<std::int64_t> sizes;            // if an executable of these alone runs it
  SizesFound sizes_found;                     // how the instance was obtained
  Tensors inputs;                             // as given
  Tensors bound_inputs;                       // as used: the same, or a copy with recorded strides
  c10::SmallVector<c10::Storage, 2> outputs;  // memory of each output; empty until taken
  c10::SmallVector<std::uint64_t, 2> output_addresses;
  Tensors given_results;                    // out=, by result; undefined or absent: fresh
  std::vector<std::size_t> copied_results;  // those of given_results that need a copy
  at::Tensor feature_map;                   // undefined: the executable's own
  std::unique_ptr<CallersTensors> callers;  // of a held call; null: it has the caller's tensors
  std::vector<c10::Storage> weights;        // by result that is a weight: its storage
  std::vector<Copy> copies_in;
  std::vector<Copy> copies_out;  // of outputs, before results are made of them
  std::vector<Copy> copies_back;
  std::uint64_t bytes_copied = 0;
  std::uint32_t outputs_allocated = 0;
  std::vector<std::uint64_t> random;  // seed and offset of each generator that kernels read
  std::uint64_t call_ns = 0;          // when the caller called
  int n_threads = 0;                  // of operators at the caller; 0: not yet known
  std::uint64_t checked_ns = 0;       // when bind_call ended
  std::uint64_t execution_ns = 0;     // once ended: duration without waits and proofs
  bool drains_queue = false;          // asking for a stream waits for torch's queue
  Drain drain;                        // for `stream`
  std::uint64_t stream = 0;           // the caller's: the driver's handle, and torch's form
  std::optional<c10::Stream> torch_stream;

  // Whether torch may be asked to copy.
  bool has_copies() const {
    return !copies_in.empty() || !copies_out.empty() || !copied_results.empty() ||
           !copies_back.empty();
  }
};

// Checks the given tensors (inputs, results and feature map) and the host constants, and allocates
// the outputs, by the shapes of the call's instance or, without one, of the spec.
//
// Errors: BindingError naming the tensor, what was expected and what was given, and ExecutionError
// when memory runs out; nothing has run.
void bind_call(const CallSpec& spec, Call& call);

// The result tensors of a finished call, including given ones. Throws BindingError if one is a view
// of memory that was freed since.
Tensors results_of(const CallSpec& spec, Call& call);

// Throws BindingError for tensors on another device of the same type.
void check_devices(const CallSpec& spec, const Call& call);

// Allocates the buffers of the inputs and outputs that are always copied. Throws ExecutionError if
// memory does not suffice.
void make_buffers(CallSpec& spec);

// Releases the buffers. No call may be bound meanwhile or afterwards.
void release_buffers(CallSpec& spec) noexcept;

// Device memory. Throws OutOfMemory, naming its purpose, if there is not enough.
c10::DataPtr allocate(c10::Device device, std::size_t n_bytes, const std::string& what);

// Throws BindingError with its name for a tensor that is not a plain strided one, or whose memory
// was freed or shrunk.
void check_memory(const std::string& name, const at::Tensor& tensor);

// Bytes of a tensor from its first element to one past its last.
std::size_t span_bytes_of(const at::Tensor& tensor);

// A tensor of this layout on a storage.
at::Tensor tensor_on(c10::Storage storage, std::int64_t offset_bytes, const TensorLayout& layout,
                     c10::Device device);

// The same if the storage records the layout of its memory (`describe_storage`).
at::Tensor tensor_on_described(c10::Storage storage, std::int64_t offset_bytes,
                               const TensorLayout& layout, c10::Device device);

}  // namespace offload
