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

// Who gives a slot its memory.
enum class CpuMemory : std::uint8_t {
  kPatched,   // somebody else: its address comes with the patches
  kOperator,  // the operator that makes what lies there, at each execution
  kKept,      // the resident, until it is closed
  kOfSizes,   // what follows from the sizes of the executions
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

// How a launch is carried out.
enum class CpuMode : std::uint8_t {
  kCall,      // the operator as recorded: it returns memory of its own, or writes its arguments
  kThunk,     // a typed out-variant
  kOut,       // the operator's out-variant, boxed
  kCopied,    // an out-variant failed its proof: called as recorded, its result copied
  kUnproved,  // has an out-variant, not yet executed
  kGathered,  // rows of a table that is not in memory are read into the result
  kKernel,    // compiled code over addresses, proved
  kReplaced,  // compiled code failed its proof: the launches that it stands for run instead
  kStart,     // begins a collective
  kWait,      // returns once a collective has ended
};

class CpuLanes;
class CpuResident;

// The launches that compiled code stands for, which run in its place where it failed its proof.
struct CpuReplaced {
  struct Result {
    std::size_t word = 0;  // of the compiled code's
    std::size_t slot = 0;  // of the resident
  };

  std::shared_ptr<CpuResident> resident;
  std::vector<std::size_t> inputs;  // the slots of the code's first words, which are patched
  std::vector<Result> results;      // whose bytes are copied to where the code's words say
};

// Compiled code in the place of launches: what it is given and what it makes, as addresses.
struct CpuKernel {
  using Function = void (*)(void* const* words);
  using Addresses = std::vector<std::uintptr_t>;

  // Where an address comes from.
  struct Word {
    std::size_t slot = 0;
    std::int64_t offset_bytes = 0;
  };

  // A weight that it derives something from: the tensors that hold it, or its number in the stream.
  struct Source {
    std::vector<at::Tensor> holders;
    std::optional<std::size_t> streamed;
  };

  Function function = nullptr;
  std::vector<Word> words;  // those of its sources first
  // With sources it runs where one was written, as torch counts writes, lies elsewhere, or was read
  // anew; without: always.
  std::vector<Source> sources;
  // Whether the function does as the launches do that it stands for, at these addresses, where
  // their Values are; changes none of them. Throws what those launches throw.
  std::function<bool(const Addresses&)> prove;
  // Makes those launches, which is asked for where the proof fails.
  std::function<CpuReplaced()> make_replaced;
  std::optional<CpuReplaced> replaced;
  Addresses addresses;  // of the execution under way; kept for its memory

  // Of one with sources: as it found them when it last ran.
  std::uint64_t n_writes = 0;    // and reads by the stream
  std::uint64_t n_requests = 0;  // of `derive_again`
  std::vector<std::uintptr_t> places;
};

// A weight of the stream whose bytes nobody needs while nothing is derived from it anew: only what
// derives from it reads it, and the proofs of these launches, whose code has what was derived.
struct PackedWeight {
  std::size_t weight = 0;  // in the stream
  std::vector<std::size_t> launches;
};

struct CpuLaunch {
  std::string operator_name;  // aten::add
  std::string overload;       // Tensor
  std::string source;
  std::string out_overload;  // empty: none
  bool has_out = false;      // an out-variant or a thunk is to be proved and used
  std::vector<c10::IValue> arguments;
  std::vector<at::Tensor> outputs;         // with has_out: where the results go
  std::vector<CpuMade> made;               // without: what it allocates
  std::optional<CpuKernel> kernel;         // in the place of an operator
  std::optional<RowTable> table;           // of an embedding whose table is gathered
  std::shared_ptr<Collective> collective;  // that it starts or waits for
  std::vector<std::size_t> releases;       // operator slots that nobody reads after it
  std::optional<c10::IValue> guard;
  bool guards_shape = false;

  // Set when the resident is built and proved.
  std::optional<c10::OperatorHandle> call;
  std::optional<c10::OperatorHandle> out;
  Thunk thunk = nullptr;
  std::vector<c10::IValue> out_stack;
  std::vector<std::size_t> lists;  // arguments that the operator may write tensors of its own into
  CpuMode mode = CpuMode::kCall;
  std::uint64_t outside_bytes = 0;  // allocated outside the arena, as counted once
};

// What of a resident varies with sizes.
struct CpuSizes {
  // A tensor that lies in the feature map, or has numbers that vary.
  struct View {
    std::size_t tensor = 0;             // of the resident
    std::size_t value = 0;              // that it shows
    std::vector<std::int64_t> numbers;  // its sizes, its strides, and its offset in bytes
    std::vector<VaryingNumber> varying;
  };

  // A result that its operator allocates.
  struct Made {
    std::size_t launch = 0;
    std::size_t index = 0;  // among those that the launch makes
    std::vector<VaryingNumber> varying;
  };

  // A number that a launch is given, or an item of a list of such.
  struct Scalar {
    std::size_t launch = 0;
    std::size_t argument = 0;
    std::optional<std::size_t> item;
    std::size_t expression = 0;
  };

  // A slot whose bytes vary, at whose base a Value lies.
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

// Throws std::out_of_range for what does not exist, and std::invalid_argument for a scalar that is
// no number and a number of a view that it does not have. `n_axes`: of each tensor.
void check_sizes(const CpuSizes& sizes, const std::vector<CpuLaunch>& launches,
                 const std::vector<std::size_t>& n_axes, std::size_t n_slots);

// Owner, thread, errors: as Resident. The first execution proves each out-variant before it is
// used: run beside the functional operator on the live inputs, it must give the same bits and
// leave guards around its results untouched. Likewise for launches that gather rows, with the
// functional operator on those rows, read another way. Compiled code is proved by its own function.
// The constructor throws OutOfMemory where there is no memory for slots that it keeps.
// Launches wait for the weights that a stream brings: those that do not come are an ExecutionError
// of the launch that needs them. Where sizes vary, the first execution by each SizedPlaces proves.
class CpuResident final : public Resident, public WeightPasses, public SizeChanges {
 public:
  // `stream`: what brings the weights; null: all of them stay where they are. Throws ExecutionError
  // for a stream that another resident has.
  CpuResident(std::vector<CpuSlot> slots, const std::vector<CpuTensor>& tensors,
              std::shared_ptr<WeightStream> stream);
  ~CpuResident() override;

  // The tensors that launches' arguments refer to, by their position in the constructor's list.
  const at::Tensor& tensor(std::size_t index) const { return tensors_.at(index); }

  // Adds the next launch. Throws std::invalid_argument for an operator that does not exist, and for
  // a table of an operator that is no embedding; PlanError for a table that its weight does not
  // have.
  void add(CpuLaunch launch);

  // Adds a launch of compiled code next; `name` stands for an operator's. Throws std::out_of_range
  // for a word of a slot that does not exist, and std::invalid_argument for more sources than
  // words.
  void add_kernel(CpuKernel kernel, std::string name, std::string source,
                  std::vector<std::size_t> releases);

  // Copies what lies in a slot, and gives back what an operator has made there. After execute.
  void copy_out(std::size_t slot, void* to) noexcept;

  // Says of which weights the stream need not keep the bytes once the launches are proved. Throws
  // std::out_of_range for a launch that was not added, and std::invalid_argument without a stream.
  void set_packed_weights(std::vector<PackedWeight> weights);

  // Says what varies with sizes, once all launches are added. Throws std::out_of_range for what
  // does not exist, and std::invalid_argument for a scalar that is no number, a number of a view
  // that it does not have, compiled code, or weights that a stream brings.
  void set_sizes(CpuSizes sizes);

  // Has executions run on these lanes, once all launches are added. Throws std::invalid_argument
  // where a stream brings weights, or sizes vary.
  void set_lanes(std::unique_ptr<CpuLanes> lanes);
  CpuLanes* lanes() const { return lanes_.get(); }

  // Has launches share their work among so many threads, 0: as torch is set where an execution is
  // asked for; and has each execution rest, so that it computes for `duty` of its time. Throws
  // std::invalid_argument for a duty that is not above 0 and at most 1, and a negative number.
  void set_share(int n_threads, double duty);

  const std::vector<CpuLaunch>& launches() const { return launches_; }

  // Has the next execution derive everything again. Any thread.
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
  std::vector<std::int64_t> indices_;  // of the gathering under way; kept for its memory
  std::shared_ptr<WeightStream> stream_;
  std::vector<PackedWeight> packed_weights_;
  std::uint64_t discarded_in_ = 0;  // the generation in which that was done last
  bool traces_weights_ = false;
  std::optional<CpuSizes> sizes_;
  std::unique_ptr<CpuLanes> lanes_;  // null: one, with as many threads as torch has
  int n_threads_ = 0;
  double duty_ = 1;
  // What was proved by places, which may have gone.
  struct ProvedModes {
    std::weak_ptr<const SizedPlaces> places;
    std::vector<CpuMode> modes;
  };

  std::shared_ptr<const SizedPlaces> places_;        // of the latest sizes
  std::map<std::size_t, ProvedModes> proved_modes_;  // by the number of places
  bool proved_ = false;
  std::atomic<std::uint64_t> n_requests_ = 1;  // before the first execution nothing is derived
  Proof proof_;
};

// Decides how a launch with an out-variant is carried out, by running it. Called where its
// arguments hold this execution's values; leaves them and every output slot as they are.
CpuMode prove_out_variant(CpuLaunch& launch);

// Whether two tensors have the same shape, dtype and bits, wherever their elements lie.
bool same_elements(const at::Tensor& one, const at::Tensor& other);

}  // namespace offload
