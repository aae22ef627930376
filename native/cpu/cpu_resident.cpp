#include "cpu/cpu_resident.hpp"

#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "cpu/allocations.hpp"
#include "cpu/kept_memory.hpp"
#include "cpu/lanes.hpp"
#include "offload/errors.hpp"
#include "run/operator_threads.hpp"
#include "run/recurrent_call.hpp"
#include "run/thread_count.hpp"

namespace offload {

CpuResident::CpuResident(std::vector<CpuSlot> slots, const std::vector<CpuTensor>& tensors,
                         std::shared_ptr<WeightStream> stream)
    : slots_(std::move(slots)), stream_(std::move(stream)) {
  if (stream_) stream_->attach();
  storages_.reserve(slots_.size());
  for (const CpuSlot& slot : slots_) {
    storages_.emplace_back(c10::Storage::use_byte_size_t(), slot.size_bytes,
                           slot.memory == CpuMemory::kKept
                               ? kept_memory(slot.size_bytes)
                               : c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
                           nullptr,
                           /*resizable=*/false);
  }
  tensors_.reserve(tensors.size());
  for (const CpuTensor& tensor : tensors) {
    tensors_.push_back(tensor_on(storages_.at(tensor.slot), tensor.offset_bytes, tensor.layout,
                                 c10::Device(c10::kCPU)));
  }
}

CpuResident::~CpuResident() = default;

void CpuResident::set_lanes(std::unique_ptr<CpuLanes> lanes) {
  if (stream_ || sizes_) throw std::invalid_argument("lanes beside streamed weights, or sizes");
  lanes_ = std::move(lanes);
}

void CpuResident::add(CpuLaunch launch) {
  launch.call = find_operator(launch.operator_name, launch.overload);
  for (std::size_t at = 0; at < launch.arguments.size(); ++at) {
    if (launch.arguments[at].isOptionalTensorList()) launch.lists.push_back(at);
  }
  const std::string full_name =
      launch.operator_name + (launch.overload.empty() ? "" : "." + launch.overload);
  if (launch.table) {
    check_gathered(launch);
    launch.mode = CpuMode::kGathered;
  } else if (launch.has_out) {
    launch.thunk = find_thunk(full_name);
    if (launch.thunk == nullptr) {
      launch.out = find_operator(launch.operator_name, launch.out_overload);
      launch.out_stack = launch.arguments;
      for (const at::Tensor& output : launch.outputs) launch.out_stack.emplace_back(output);
      if (launch.out->schema().arguments().size() != launch.out_stack.size()) {
        throw std::invalid_argument(full_name + " and its out-variant " + launch.out_overload +
                                    " take different arguments");
      }
    }
    launch.mode = CpuMode::kUnproved;
  }
  launches_.push_back(std::move(launch));
}

std::vector<Relocation> CpuResident::relocations() const {
  std::vector<Relocation> all;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].memory != CpuMemory::kPatched) continue;
    all.push_back({static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(slot), 0});
  }
  return all;
}

void CpuResident::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) {
    storages_[patch.word].unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(reinterpret_cast<void*>(patch.address), c10::Device(c10::kCPU)));
  }
}

void CpuResident::set_share(int n_threads, double duty) {
  if (n_threads < 0 || !(duty > 0 && duty <= 1)) {
    throw std::invalid_argument("an impossible share of the processor");
  }
  n_threads_ = n_threads;
  duty_ = duty;
}

void CpuResident::execute(Submission& submission, LaunchTimes* times) {
  if (lanes_) return lanes_->execute(submission, times);
  const OperatorThreads threads(n_threads_);
  execute_in_order(submission, times);
  if (duty_ < 1) rest(submission.end_ns);
}

void CpuResident::rest(std::uint64_t begin_ns) const {
  const double took_ns = static_cast<double>(now_ns() - begin_ns);
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(static_cast<std::int64_t>(took_ns * (1 / duty_ - 1))));
}

void CpuResident::execute_in_order(Submission& submission, LaunchTimes* times) {
  take_threads();
  if (stream_) stream_->begin_pass(launches_.size(), traces_weights_);
  submission.end_ns = now_ns();
  std::size_t current = 0;
  try {
    if (stream_) {
      run_all</*streamed=*/true>(current, submission.end_ns, times);
    } else {
      run_all</*streamed=*/false>(current, submission.end_ns, times);
    }
  } catch (...) {
    if (stream_) stream_->abandon_pass();
    fail(launches_[current]);
  }
  end_pass();
}

template <bool streamed>
void CpuResident::run_all(std::size_t& current, std::uint64_t begin_ns, LaunchTimes* times) {
  for (; current < launches_.size(); ++current) {
    if constexpr (streamed) stream_->before(current);
    run_one(launches_[current]);
    if constexpr (streamed) stream_->after(current);
    if (times == nullptr) continue;
    times->begin_ns[current] = begin_ns;
    begin_ns = now_ns();
    times->end_ns[current] = begin_ns;
    ++times->clock_reads;
  }
}

void CpuResident::issue(std::size_t launch) {
  const OperatorThreads threads(n_threads_);
  take_threads();
  if (stream_ && launch == 0) stream_->begin_pass(launches_.size(), traces_weights_);
  try {
    if (stream_) stream_->before(launch);
    run_one(launches_.at(launch));
    if (stream_) stream_->after(launch);
  } catch (...) {
    if (stream_) stream_->abandon_pass();
    fail(launches_[launch]);
  }
  if (launch + 1 == launches_.size()) end_pass();
}

void CpuResident::end_pass() {
  if (!proved_ && places_) keep_proofs();
  proved_ = true;
  if (!stream_) return;
  if (discarded_in_ != stream_->generation()) discard_packed();
  stream_->end_pass();
}

void CpuResident::run_one(CpuLaunch& launch) {
  if (proved_) {
    run(launch, stack_, launch.releases);
  } else {
    prove_and_run(launch);
  }
}

void CpuResident::prove_and_run(CpuLaunch& launch) {
  const bool is_unproved = launch.mode == CpuMode::kUnproved;
  const std::uint64_t begin_ns = now_ns();
  if (is_unproved && launch.kernel) {
    prove_kernel(launch);
  } else if (is_unproved) {
    launch.mode = prove_out_variant(launch);
  }
  const at::Tensor expected = launch.table ? embedded_from_few(launch) : at::Tensor();
  const std::uint64_t run_ns = now_ns();
  const AllocationCount count;
  run(launch, stack_, launch.releases);
  launch.outside_bytes = count.bytes();
  if (!is_unproved && !launch.table) return;
  const std::uint64_t compare_ns = now_ns();
  if (expected.defined() && !same_elements(launch.outputs.front(), expected)) {
    throw ExecutionError(
        "the rows that were gathered are not those that the operator gives of the table in its "
        "store: load without a budget, and report this");
  }
  ++proof_.n_launches;
  proof_.n_failed += launch.mode == CpuMode::kCopied || launch.mode == CpuMode::kReplaced;
  proof_.ns += run_ns - begin_ns + now_ns() - compare_ns;
}

void CpuResident::fail(const CpuLaunch& launch) {
  give_up();
  tell(launch);
}

void CpuResident::give_up() noexcept {
  for (const CpuLaunch& one : launches_) {
    if (one.collective) one.collective->drain();
  }
  release_all();
  proof_ = {};
}

// Called while a launch's error is being handled: adds which launch it was.
void CpuResident::tell(const CpuLaunch& launch) {
  rethrow_of_launch(launch.source + ": " + launch.operator_name);
}

void CpuResident::run(CpuLaunch& launch, std::vector<c10::IValue>& stack,
                      const std::vector<std::size_t>& releases) {
  switch (launch.mode) {
    case CpuMode::kKernel:
    case CpuMode::kReplaced:
      run_kernel(launch);
      break;
    case CpuMode::kThunk:
      launch.thunk(launch.arguments.data(), launch.outputs.data());
      break;
    case CpuMode::kOut:
      push(launch.out_stack, launch, stack);
      launch.out->callBoxed(&stack);
      stack.clear();
      break;
    case CpuMode::kCall:
    case CpuMode::kCopied:
    case CpuMode::kUnproved:
      call(launch, stack);
      break;
    case CpuMode::kGathered:
      gather(launch);
      break;
    case CpuMode::kStart:
      launch.collective->start();
      break;
    case CpuMode::kWait:
      launch.collective->wait();
      break;
  }
  for (const std::size_t slot : releases) release(slot);
}

// Callees share the lists that they receive. `_unsafe_masked_index` writes its clamped indices into
// its list argument (torch 2.13, TensorAdvancedIndexing.cpp).
void CpuResident::push(const std::vector<c10::IValue>& arguments, const CpuLaunch& launch,
                       std::vector<c10::IValue>& stack) {
  stack.assign(arguments.begin(), arguments.end());
  for (const std::size_t at : launch.lists) stack[at] = stack[at].toList().copy();
}

void CpuResident::call(CpuLaunch& launch, std::vector<c10::IValue>& stack) {
  push(launch.arguments, launch, stack);
  call_operator(*launch.call, launch.overload, stack);
  if (launch.guard) check_guard(stack.at(0), *launch.guard, launch.source, launch.operator_name);
  if (launch.mode == CpuMode::kCopied) {
    const std::vector<at::Tensor> results = tensors_on(stack);
    for (std::size_t index = 0; index < launch.outputs.size(); ++index) {
      launch.outputs[index].copy_(results.at(index));
    }
  } else if (!launch.made.empty()) {
    const std::vector<at::Tensor> results = tensors_on(stack);
    for (const CpuMade& made : launch.made) adopt(launch, results, made);
  }
  stack.clear();
}

// Moves a result's memory into its slot, where the tensors of later launches find it.
void CpuResident::adopt(CpuLaunch& launch, const std::vector<at::Tensor>& results,
                        const CpuMade& made) {
  const at::Tensor& result = results.at(made.position);
  if (!result.defined() && slots_[made.slot].size_bytes == 0) return;  // some return none for empty
  check_result(result, made.layout, made.offset_bytes, launch.guards_shape,
               launch.source + ": " + launch.operator_name);
  c10::StorageImpl* const storage = result.storage().unsafeGetStorageImpl();
  c10::StorageImpl* const slot = storages_[made.slot].unsafeGetStorageImpl();
  std::size_t n_sharing = 0;
  for (const at::Tensor& other : results) {
    n_sharing += other.defined() && other.storage().unsafeGetStorageImpl() == storage;
  }
  if (storage->nbytes() < slots_[made.slot].size_bytes) {
    throw ExecutionError("returned fewer bytes than recorded");
  }
  // One reference for each result tensor on the stack; more means that another owner holds it.
  if (static_cast<std::size_t>(result.storage().use_count()) <= n_sharing) {
    slot->set_data_ptr_noswap(storage->set_data_ptr(c10::DataPtr(nullptr, result.device())));
  } else {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(slots_[made.slot].size_bytes);
    std::memcpy(memory.get(), storage->data(), slots_[made.slot].size_bytes);
    slot->set_data_ptr_noswap(std::move(memory));
  }
}

c10::Storage CpuResident::take(std::size_t slot) {
  c10::DataPtr memory = storages_.at(slot).unsafeGetStorageImpl()->set_data_ptr(
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  return {c10::Storage::use_byte_size_t(), storages_[slot].nbytes(), std::move(memory),
          c10::GetCPUAllocator(), /*resizable=*/true};
}

void CpuResident::close() noexcept {
  if (stream_) stream_->close();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].memory == CpuMemory::kKept) release(slot);
  }
}

void CpuResident::release(std::size_t slot) noexcept {
  storages_[slot].unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
}

void CpuResident::release_all() noexcept {
  stack_.clear();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].memory == CpuMemory::kOperator) release(slot);
  }
}

}  // namespace offload
