#include "run/dispatched_execution.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <string>
#include <utility>

#include "offload/calling_back.hpp"
#include "offload/clock.hpp"
#include "offload/errors.hpp"
#include "run/dependencies.hpp"
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

// Binds a call of a segment, whose tensors are known.
void bind_call_at(const DispatchSite& site, Call& call, const Surroundings& asked) {
  Replay& replay = *site.replay;
  if (replay.closed()) throw ExecutionError("the executable is closed: load the program again");
  bind_call_in(replay, call, asked);
  if (site.draw) {
    const c10::Device device = replay.spec().device;
    const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
    replay.check_ready(call);  // a draw cannot be undone
    call.random = site.draw();
  }
}

// A call that is submitted once tickets have ended.
struct Behind {
  std::shared_ptr<const DispatchSpec> spec;
  std::shared_ptr<Replay> replay;
  std::shared_ptr<Call> call;
  std::shared_ptr<Ticket> ticket;  // has a DependencyError where one of the others has failed
  std::vector<std::shared_ptr<Ticket>> waits;
};

void submit_behind(const std::shared_ptr<Behind>& one) noexcept {
  try {
    for (const std::shared_ptr<Ticket>& awaited : one->waits) {
      if (awaited->done()) continue;
      return awaited->when_done([one] { one->spec->without_gil([&one] { submit_behind(one); }); });
    }
    for (const std::shared_ptr<Ticket>& awaited : one->waits) check_dependency(awaited->error());
    one->replay->submit(std::exchange(one->call, nullptr), one->ticket, {});
  } catch (...) {
    const CallingBack calling_back;
    one->ticket->finish(std::current_exception());
  }
}

}  // namespace

void DispatchSpec::check() const {
  DispatchPlan::check();
  const std::size_t n_segments = rules.inputs.size();
  expect(values.size() == rules.names.size(), "each Value has a layout");
  expect(sites.size() == n_segments * graph.n_devices, "each segment has a site for each device");
  expect(memories.size() == rules.n_memories, "each memory has a place");
  const auto below = [](std::int64_t number, std::size_t limit) {
    expect(number >= 0 && at_index(number) < limit, "a number is that of a Value");
  };
  for (const auto& one : groups) {
    expect(!one.empty(), "a group has Values");
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

bool DispatchSpec::is_inside_launch() const {
  return std::any_of(sites.begin(), sites.end(), [](const DispatchSite& one) {
    return one.replay && one.replay->is_inside_launch();
  });
}

std::size_t block_bytes(const DispatchSpec& spec, const std::vector<std::int64_t>& values) {
  std::size_t n_bytes = 0;
  for (const std::int64_t value : values)
    n_bytes += aligned(spec.values[at_index(value)].size_bytes);
  return n_bytes;
}

DispatchedExecution::DispatchedExecution(std::shared_ptr<const DispatchSpec> spec,
                                         const std::vector<at::Tensor>& inputs,
                                         std::vector<Surroundings> asked,
                                         std::vector<std::vector<std::shared_ptr<Ticket>>> waits,
                                         std::shared_ptr<const HeldStorages> pins,
                                         std::shared_ptr<Ticket> end)
    : DispatchedWork(spec, std::move(end)),
      spec_(std::move(spec)),
      asked_(std::move(asked)),
      refreshed_(std::move(waits)),
      held_(spec_->values.size() * spec_->memories.size()),
      pins_(std::move(pins)) {
  expect(inputs.size() == spec_->given.size(), "an execution has the inputs of the Program");
  expect(asked_.size() == spec_->graph.n_devices, "the state of the caller is known by device");
  expect(refreshed_.size() == spec_->memories.size(), "refreshed weights are known by memory");
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

// ---- its work ----

void DispatchedExecution::bind(std::int64_t segment, std::int64_t device) {
  const DispatchSite& one = site(segment, device);
  if (!one.replay) throw PlanError("a segment begins on a device that does not have it");
  const std::int64_t memory = spec_->graph.memory_of[at_index(device)];
  auto call = std::make_shared<Call>();
  call->call_ns = now_ns();
  for (const std::int64_t value : spec_->rules.outputs[at_index(segment)]) {
    if (!held(value, memory).defined()) {
      allocate_block(spec_->groups[spec_->values[at_index(value)].group], memory);
    }
    call->given_results.push_back(held(value, memory));
  }
  for (const std::int64_t value : spec_->rules.inputs[at_index(segment)]) {
    call->inputs.push_back(held(value, memory));
  }
  const Surroundings& asked = asked_[at_index(device)];
  if (one.has_buffers) {
    spec_->with_gil([&] { bind_call_at(one, *call, asked); });
  } else {
    bind_call_at(one, *call, asked);
  }
  call->checked_ns = now_ns();
  bound_ = std::move(call);
}

std::shared_ptr<Ticket> DispatchedExecution::submit(std::int64_t segment, std::int64_t device) {
  const std::shared_ptr<Replay>& replay = site(segment, device).replay;
  auto ticket = std::make_shared<Ticket>();
  const auto& waits = refreshed_[memory_of(device)];
  std::shared_ptr<Call> call = std::exchange(bound_, nullptr);
  if (waits.empty()) {
    replay->submit(call, ticket, {});
  } else {
    submit_behind(std::make_shared<Behind>(Behind{spec_, replay, std::move(call), ticket, waits}));
  }
  return ticket;
}

std::shared_ptr<Ticket> DispatchedExecution::copy(std::int64_t producer, std::int64_t origin,
                                                  std::int64_t target,
                                                  const std::vector<std::int64_t>& values) {
  std::vector<CopyPiece> pieces;
  std::vector<bool> is_copied(spec_->groups.size(), false);
  for (const std::int64_t value : values) {
    const DispatchValue& one = spec_->values[at_index(value)];
    std::size_t size_bytes = one.size_bytes;
    if (producer == kCaller) {
      if (!held(value, target).defined()) allocate_block({value}, target);
    } else {
      const auto& group = spec_->groups[one.group];
      if (is_copied[one.group]) continue;  // with the first of its group
      is_copied[one.group] = true;
      if (!held(value, target).defined()) allocate_block(group, target);
      if (group.size() > 1) size_bytes = block_bytes(*spec_, group);
    }
    pieces.push_back({held(value, origin), held(value, target), size_bytes});
  }
  return spec_->copy(*this, producer, origin, target, values, std::move(pieces));
}

std::optional<DispatchedWork::Took> DispatchedExecution::took(std::int64_t segment,
                                                              std::int64_t device) const {
  const DispatchSite& one = site(segment, device);
  if (!one.is_timed) return std::nullopt;
  const LastExecution last = one.replay->last_execution();
  return Took{one.cost_ns,
              static_cast<double>(last.device_ns()) - static_cast<double>(last.proof.ns)};
}

void DispatchedExecution::release() noexcept {
  std::fill(held_.begin(), held_.end(), at::Tensor());
  pins_.reset();
  context.reset();
}

}  // namespace offload
