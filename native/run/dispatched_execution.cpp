#include "run/dispatched_execution.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "run/device_storages.hpp"
#include "run/kernel_scope.hpp"

namespace offload {
namespace {

constexpr std::size_t kAlignment_bytes = 512;
constexpr std::int64_t kNowhere = -1;

std::size_t at_index(std::int64_t number) { return static_cast<std::size_t>(number); }

std::size_t aligned(std::size_t n_bytes) {
  return (n_bytes + kAlignment_bytes - 1) / kAlignment_bytes * kAlignment_bytes;
}

// Memory that belongs to the stream of transfers, on which nothing else is enqueued: torch's
// allocators reuse a block behind the work of its own stream only.
c10::Storage storage_in(const DispatchMemory& memory, std::size_t n_bytes) {
  if (!memory.is_pinned && !memory.stream) {
    return make_storage(memory.device, n_bytes,
                        allocate(memory.device, n_bytes, "what segments make"));
  }
  const KernelScope scope;
  c10::OptionalStreamGuard on_stream;
  if (memory.stream) on_stream.reset_stream(*memory.stream);
  const auto options = at::TensorOptions()
                           .dtype(at::kByte)
                           .device(memory.device)
                           .pinned_memory(memory.is_pinned && n_bytes > 0);
  try {
    return at::empty({static_cast<std::int64_t>(n_bytes)}, options).storage();
  } catch (const c10::Error& error) {
    throw OutOfMemory("out of memory: " + std::to_string(n_bytes) +
                      " bytes for what segments make cannot be allocated on " +
                      memory.device.str() + ": " + error.what_without_backtrace());
  }
}

void expect(bool fits, const char* what) {
  if (!fits) throw PlanError(std::string("the dispatch of segments: ") + what);
}

bool is_consequence(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DependencyError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

void DispatchSpec::check() const {
  rules.check();
  const std::size_t n_segments = rules.inputs.size();
  expect(values.size() == rules.names.size(), "each Value has a layout");
  expect(sites.size() == n_segments * graph.n_devices, "each segment has a site for each device");
  expect(graph.memory_of.size() == graph.n_devices, "each device has a memory");
  expect(memories.size() == rules.n_memories, "each memory has a place");
  expect(graph.home == rules.home, "both have the same home");
  expect(shared.size() == graph.values.size(), "shared Values are those of the graph");
  expect(paces && paces->size() == graph.n_devices, "each device has a pace");
  const auto below = [](std::int64_t number, std::size_t limit) {
    expect(number >= 0 && at_index(number) < limit, "a number is that of a Value");
  };
  for (const auto& one : groups) {
    expect(!one.empty(), "a group has Values");
    for (const std::int64_t value : one) below(value, values.size());
  }
  for (const auto& one : shared) {
    for (const std::int64_t value : one) below(value, values.size());
  }
  for (const std::int64_t value : given) {
    if (value != kNowhere) below(value, values.size());
  }
  for (const auto& made : rules.outputs) {
    for (const std::int64_t value : made) {
      expect(values[at_index(value)].group < groups.size(), "what a segment makes has a group");
    }
  }
  for (std::size_t at = 0; at < sites.size(); ++at) {
    if (!sites[at].replay) continue;
    const CallSpec& call = sites[at].replay->spec();
    const std::size_t segment = at / graph.n_devices;
    expect(call.inputs.size() == rules.inputs[segment].size() &&
               call.results.size() == rules.outputs[segment].size(),
           "an executable takes and gives the Values of its segment");
  }
}

std::size_t block_bytes(const DispatchSpec& spec, const std::vector<std::int64_t>& values) {
  std::size_t n_bytes = 0;
  for (const std::int64_t value : values)
    n_bytes += aligned(spec.values[at_index(value)].size_bytes);
  return n_bytes;
}

DispatchedExecution::DispatchedExecution(std::shared_ptr<const DispatchSpec> spec,
                                         const std::vector<at::Tensor>& inputs,
                                         std::vector<Surroundings> asked_of,
                                         std::vector<std::vector<std::shared_ptr<Ticket>>> waits,
                                         std::shared_ptr<const HeldStorages> pins,
                                         std::shared_ptr<Ticket> end)
    : check(spec->rules),
      asked(std::move(asked_of)),
      refreshed(std::move(waits)),
      done(std::move(end)),
      devices(spec->rules.inputs.size(), kNowhere),
      observed(spec->graph.n_devices, false),
      spec_(std::move(spec)),
      held_(spec_->values.size() * spec_->memories.size()),
      pins_(std::move(pins)) {
  expect(inputs.size() == spec_->given.size(), "an execution has the inputs of the Program");
  expect(asked.size() == spec_->graph.n_devices, "the state of the caller is known by device");
  expect(refreshed.size() == spec_->memories.size(), "refreshed weights are known by memory");
  const std::int64_t home = spec_->graph.home;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    if (spec_->given[index] != kNowhere) held(spec_->given[index], home) = inputs[index];
  }
  std::vector<std::int64_t> inner;
  for (const auto& made : spec_->rules.outputs) {
    for (const std::int64_t value : made) {
      const DispatchValue& one = spec_->values[at_index(value)];
      if (!one.is_returned) {
        inner.push_back(value);
        continue;
      }
      const c10::Device device = spec_->memories[at_index(home)].device;
      c10::Storage storage = make_storage(device, one.size_bytes,
                                          offload::allocate(device, one.size_bytes, "a result"));
      held(value, home) = tensor_on(std::move(storage), 0, one.layout, device);
    }
  }
  if (spec_->memories.size() == 1 && !inner.empty()) allocate_block(inner, home);
}

void DispatchedExecution::allocate(std::size_t group, std::int64_t memory) {
  allocate_block(spec_->groups[group], memory);
}

void DispatchedExecution::allocate_given(std::int64_t value, std::int64_t memory) {
  allocate_block({value}, memory);
}

void DispatchedExecution::allocate_block(const std::vector<std::int64_t>& values,
                                         std::int64_t memory) {
  const DispatchMemory& place = spec_->memories[at_index(memory)];
  const c10::Storage whole = storage_in(place, block_bytes(*spec_, values));
  std::size_t begin_bytes = 0;
  for (const std::int64_t value : values) {
    const DispatchValue& one = spec_->values[at_index(value)];
    held(value, memory) =
        tensor_on(whole, static_cast<std::int64_t>(begin_bytes), one.layout, place.device);
    begin_bytes += aligned(one.size_bytes);
  }
}

void DispatchedExecution::fail(std::exception_ptr error) noexcept {
  const bool follows = is_consequence(error);
  if (error_ && (!is_consequence_ || follows)) return;
  error_ = std::move(error);
  is_consequence_ = follows;
}

void DispatchedExecution::release() noexcept {
  std::fill(held_.begin(), held_.end(), at::Tensor());
  pins_.reset();
}

}  // namespace offload
