// A program resident in the CPU's memory: its launches in order, on tensors over patched storages.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/collectives.hpp"
#include "cpu/thunks.hpp"
#include "offload/resident.hpp"
#include "run/call.hpp"
#include "run/operator_calls.hpp"
#include "streaming/weight_stream.hpp"

namespace offload {

// What provides a slot's memory.
enum class CpuMemory : std::uint8_t {
  kPatched,   // another owner: its address comes with the patches
  kOperator,  // the operator that makes its content, at each execution
  kKept,      // the resident, until it is closed
  kOfSizes,   // the constants of the executions' sizes
};

struct CpuSlot {
  std::size_t size_bytes = 0;
  CpuMemory memory = CpuMemory::kPatched;
};

// A tensor on a slot.
struct CpuTensor {
  std::size_t slot = 0;
  std::int64_t offset_bytes = 0;
  TensorLayout layout;
};

// A result that the operator allocates, and the slot that takes its memory.
struct CpuMade {
  std::size_t position = 0;  // among the tensors that the operator returns
  std::size_t slot = 0;
  std::int64_t offset_bytes = 0;
  TensorLayout layout;
};

// How a launch is executed.
enum class CpuMode : std::uint8_t {
  kCall,      // the operator as recorded: it returns its own memory, or writes its arguments
  kThunk,     // a typed out-variant
  kOut,       // the operator's out-variant, boxed
  kCopied,    // an out-variant failed its proof: called as recorded, its result copied
  kUnproved,  // has an out-variant, not executed yet
  kGathered,  // rows of a table outside memory are read into the result
  kKernel,    // compiled code over addresses, proved
  kReplaced,  // compiled code failed its proof: the launches that it replaces run instead
  kStart,     // begins a collective
  kWait,      // waits for the end of a collective
};

class CpuLanes;
class CpuResident;

// The launches that compiled code replaces, which run in its place where it failed its proof.
struct CpuReplaced {
  struct Result {
    std::size_t word = 0;  // of the compiled code
    std::size_t slot = 0;  // of the resident
  };

  std::shared_ptr<CpuResident> resident;
  std::vector<std::size_t> inputs;  // the slots of the code's first words, which are patched
  std::vector<Result> results;      // whose bytes are copied to the addresses in the code's words
};

// Compiled code in place of launches: its operands and results, as addresses.
struct CpuKernel {
  using Function = void (*)(void* const* words);
  using Addresses = std::vector<std::uintptr_t>;

  // The source of an address.
  struct Word {
    std::size_t slot = 0;
    std::int64_t offset_bytes = 0;
  };

  // A weight from which it derives something: the tensors that hold it, or its number in the
  // stream.
  struct Source {
    std::vector<at::Tensor> holders;
    std::optional<std::size_t> streamed;
  };

  Function function = nullptr;
  std::vector<Word> words;  // its sources' words first
  // With sources it runs where one was written, by torch's count of writes, has moved, or was read
  // again; without sources always.
  std::vector<Source> sources;
  // Whether the function is equivalent to the launches that it replaces, at these addresses of
  // their Values; changes none of the Values. Throws what those launches throw.
  std::function<bool(const Addresses&)> prove;
  // Makes those launches; called where the proof fails.
  std::function<CpuReplaced()> make_replaced;
  std::optional<CpuReplaced> replaced;
  Addresses addresses;  // of the running execution; kept for its memory

  // Of a kernel with sources: the state of its sources when it last ran.
  std::uint64_t n_writes = 0;    // and reads by the stream
  std::uint64_t n_requests = 0;  // of `derive_again`
  std::vector<std::uintptr_t> places;
};

// A weight of the stream whose bytes are needed only to derive from it again: only deriving kernels
// read it, and the proofs of these launches, whose code uses the derived values.
struct PackedWeight {
  std::size_t weight = 0;  // in the stream
  std::vector<std::size_t> launches;
};

struct CpuLaunch {
  std::string operator_name;  // aten::add
  std::string overload;       // Tensor
  std::string source;
  std::string out_overload;  // empty: none
  bool has_out = false;      // an out-variant or a thunk is proved and used
  std::vector<c10::IValue> arguments;
  std::vector<at::Tensor> outputs;         // with has_out: the places of the results
  std::vector<CpuMade> made;               // without has_out: what it allocates
  std::optional<CpuKernel> kernel;         // in place of an operator
  std::optional<RowTable> table;           // of an embedding with a gathered table
  std::shared_ptr<Collective> collective;  // which it starts or waits for
  std::vector<std::size_t> releases;       // operator slots that no later launch reads
  std::optional<c10::IValue> guard;
  bool guards_shape = false;

  // Set when the resident is built and proved.
  std::optional<c10::OperatorHandle> call;
  std::optional<c10::OperatorHandle> out;
  Thunk thunk = nullptr;
  std::vector<c10::IValue> out_stack;
  std::vector<std::size_t> lists;  // arguments into which the operator may write tensors of its own
  CpuMode mode = CpuMode::kCall;
  std::uint64_t outside_bytes = 0;  // allocated outside the arena, counted once
};

// The parts of a resident that vary with sizes.
struct CpuSizes {
  // A tensor that lies in the feature map, or has numbers that vary.
  struct View {
    std::size_t tensor = 0;             // of the resident
    std::size_t value = 0;              // of which it is a view
    std::vector<std::int64_t> numbers;  // its sizes, its strides, and its offset in bytes
    std::vector<VaryingNumber> varying;
  };

  // A result that its operator allocates.
  struct Made {
    std::size_t launch = 0;
    std::size_t index = 0;  // among the launch's results
    std::vector<VaryingNumber> varying;
  };

  // A number among the arguments of a launch, or an item of a list of numbers.
  struct Scalar {
    std::size_t launch = 0;
    std::size_t argument = 0;
    std::optional<std::size_t> item;
    std::size_t expression = 0;
  };

  // A slot of varying bytes, with a Value at its base.
  struct Slot {
    std::size_t slot = 0;
    std::size_t value = 0;
  };

  std::vector<View> views;
  std::vector<Made> made;
  std::vector<Scalar> scalars;
  std::vector<Slot> slots;
  std::vector<Slot> constants;  // in the order of SizedProgram::constants
  std::optional<std::size_t> feature_map;
};

// Throws std::out_of_range for unknown indices, and std::invalid_argument for a scalar that is not
// a number and for a number that a view does not have. `n_axes`: of each tensor.
void check_sizes(const CpuSizes& sizes, const std::vector<CpuLaunch>& launches,
                 const std::vector<std::size_t>& n_axes, std::size_t n_slots);

// Owner, thread, errors: as Resident. The first execution proves each out-variant before it is
// used: run beside the functional operator on the live inputs, it must give the same bits and leave
// guards around its results untouched. Likewise for launches that gather rows, with the functional
// operator on the same rows, read in another way. Compiled code is proved by its own function. The
// constructor throws OutOfMemory where there is no memory for slots that it keeps. Launches wait
// for streamed weights: a weight that does not arrive is an ExecutionError of the launch that needs
// it. Where sizes vary, the first execution with each SizedPlaces proves.
class CpuResident final : public Resident, public WeightPasses, public SizeChanges {
 public:
  // `stream`: transfers the weights; null: all of them stay in place. Throws ExecutionError for a
  // stream of another resident.
  CpuResident(std::vector<CpuSlot> slots, const std::vector<CpuTensor>& tensors,
              std::shared_ptr<WeightStream> stream);
  ~CpuResident() override;

  // The tensors to which launches' arguments refer, by their position in the constructor's list.
  const at::Tensor& tensor(std::size_t index) const { return tensors_.at(index); }

  // Adds the next launch. Throws std::invalid_argument for an unknown operator, and for a table of
  // an operator that is not an embedding; PlanError for a table that its weight does not have.
  void add(CpuLaunch launch);

  // Adds a launch of compiled code; `name` takes the place of an operator's. Throws
  // std::out_of_range for a word of an unknown slot, and std::invalid_argument for more sources
  // than words.
  void add_kernel(CpuKernel kernel, std::string name, std::string source,
                  std::vector<std::size_t> releases);

  // Copies the content of a slot, and frees what an operator has allocated there. After execute.
  void copy_out(std::size_t slot, void* to) noexcept;

  // Sets the weights whose bytes the stream need not keep once the launches are proved. Throws
  // std::out_of_range for a launch that was not added, and std::invalid_argument without a stream.
  void set_packed_weights(std::vector<PackedWeight> weights);

  // Sets what varies with sizes, once all launches are added. Throws std::out_of_range for unknown
  // indices, and std::invalid_argument for a scalar that is not a number, a number that a view does
  // not have, compiled code, or streamed weights.
  void set_sizes(CpuSizes sizes);

  // Makes executions run on these lanes, once all launches are added. Throws std::invalid_argument
  // where weights are streamed, or sizes vary.
  void set_lanes(std::unique_ptr<CpuLanes> lanes);
  CpuLanes* lanes() const { return lanes_.get(); }

  // Makes launches share their work among this many threads (0: torch's setting where an execution
  // is requested), and makes each execution rest, so that it computes for the fraction `duty` of
  // its time. Throws std::invalid_argument for a duty that is not above 0 and at most 1, and for a
  // negative number.
  void set_share(int n_threads, double duty);

  const std::vector<CpuLaunch>& launches() const { return launches_; }

  // Makes the next execution derive everything again. Any thread.
  void derive_again() noexcept { n_requests_.fetch_add(1, std::memory_order_relaxed); }

  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launches_.size(); }
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  Proof proof() const override { return proof_; }
  c10::Storage take(std::size_t slot) override;
  SizeChanges* size_changes() override { return sizes_ ? this : nullptr; }
  void check(const SizedProgram& sizes) const override;
  void resize(const SizedProgram& sizes) override;
  WeightPasses* weight_passes() override { return stream_ ? this : nullptr; }
  void trace_weights(bool traced) override { traces_weights_ = traced; }
  PassReport take_pass() override { return stream_->take_report(); }
  void close() noexcept override;

 private:
  friend class CpuLanes;

  void rest(std::uint64_t begin_ns) const;
  void execute_in_order(Submission& submission, LaunchTimes* times);
  template <bool streamed>
  void run_all(std::size_t& current, std::uint64_t begin_ns, LaunchTimes* times);
  void run_one(CpuLaunch& launch);
  void prove_and_run(CpuLaunch& launch);
  void run(CpuLaunch& launch, std::vector<c10::IValue>& stack,
           const std::vector<std::size_t>& releases);
  void find_addresses(CpuKernel& kernel) const;
  void prove_kernel(CpuLaunch& launch) const;
  void run_kernel(CpuLaunch& launch);
  std::uint64_t count_writes(const CpuKernel& kernel) const;
  std::uint64_t count_requests(const CpuKernel& kernel) const;
  void discard_packed();
  void resize_slots(const SizedProgram& sizes);
  void take_proofs_of(const SizedPlaces& places);
  void keep_proofs();
  void end_pass();
  [[noreturn]] void fail(const CpuLaunch& launch);
  [[noreturn]] static void tell(const CpuLaunch& launch);
  void give_up() noexcept;
  void call(CpuLaunch& launch, std::vector<c10::IValue>& stack);
  static void push(const std::vector<c10::IValue>& arguments, const CpuLaunch& launch,
                   std::vector<c10::IValue>& stack);
  void check_gathered(const CpuLaunch& launch) const;
  void gather(CpuLaunch& launch);
  at::Tensor embedded_from_few(const CpuLaunch& launch);
  void adopt(CpuLaunch& launch, const std::vector<at::Tensor>& results, const CpuMade& made);
  void release(std::size_t slot) noexcept;
  void release_all() noexcept;

  std::vector<CpuSlot> slots_;
  std::vector<c10::Storage> storages_;  // by slot
  std::vector<at::Tensor> tensors_;
  std::vector<CpuLaunch> launches_;
  std::vector<c10::IValue> stack_;
  std::vector<std::int64_t> indices_;  // of the running gather; kept for its memory
  std::shared_ptr<WeightStream> stream_;
  std::vector<PackedWeight> packed_weights_;
  std::uint64_t discarded_in_ = 0;  // the generation of the last discard
  bool traces_weights_ = false;
  std::optional<CpuSizes> sizes_;
  std::unique_ptr<CpuLanes> lanes_;  // null: one, with as many threads as torch has
  int n_threads_ = 0;
  double duty_ = 1;
  // The proofs by places, which may have been destroyed.
  struct ProvedModes {
    std::weak_ptr<const SizedPlaces> places;
    std::vector<CpuMode> modes;
  };

  std::shared_ptr<const SizedPlaces> places_;        // of the latest sizes
  std::map<std::size_t, ProvedModes> proved_modes_;  // by the number of places
  bool proved_ = false;
  std::atomic<std::uint64_t> n_requests_ = 1;  // initially nothing is derived
  Proof proof_;
};

// Decides how a launch with an out-variant is executed, by running it. Called while its arguments
// hold this execution's values; does not change them or any output slot.
CpuMode prove_out_variant(CpuLaunch& launch);

// Whether two tensors have the same shape, dtype and bits, whatever their strides.
bool same_elements(const at::Tensor& one, const at::Tensor& other);

}  // namespace offload
