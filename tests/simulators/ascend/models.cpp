#include "models.hpp"

#include <algorithm>

namespace simulated_ascend {

using simulator::Gate;
using simulator::LateWork;
using simulator::Mark;
using simulator::Record;
using simulator::Runner;
using simulator::Status;
using simulator::Wait;

std::shared_ptr<Task> make_task(ModelTaskType type, TaskContent content) {
  auto task = std::make_shared<Task>();
  task->type = type;
  task->content = std::move(content);
  return task;
}

namespace {

bool is_accessible(Runtime& state, std::uint64_t address, std::size_t n_bytes) {
  return !state.device.memory.covering(address, n_bytes).empty();
}

// Memory with an address may have been mapped anew; other memory has a new id once it was freed.
std::uint64_t allocation_at(Runtime& state, std::uint64_t address) {
  const auto* found = state.device.memory.find(address);
  return found == nullptr || found->chunk != nullptr ? 0 : found->id;
}

// Whether a kernel would find its code and its arguments now. If not, it is an exception of the AI
// core.
bool can_run(Runtime& state, const KernelContent& kernel) {
  const auto* found = state.device.memory.find(kernel.arguments);
  const bool is_hosts = found != nullptr && found->kind == simulator::MemoryKind::kHost;
  if (kernel.function->function == nullptr || is_hosts) return false;
  const bool is_there =
      kernel.argument_bytes == 0 || is_accessible(state, kernel.arguments, kernel.argument_bytes);
  const bool is_same =
      kernel.allocation == 0 || allocation_at(state, kernel.arguments) == kernel.allocation;
  return is_there && is_same;
}

}  // namespace

void keep_arguments(Runtime& state, const void* arguments, KernelContent& kernel) {
  kernel.block.reset();
  kernel.arguments = as_number(arguments);
  kernel.allocation = allocation_at(state, kernel.arguments);
}

void perform(Runtime& state, const Task& task, Runner& runner) {
  if (task.is_disabled) return;
  if (const auto* kernel = std::get_if<KernelContent>(&task.content)) {
    if (!can_run(state, *kernel)) return runner.fail(Status::kLaunchFailed);
    runner.perform(simulator::BlockKernelCall{kernel->function->function, kernel->function->user,
                                              kernel->arguments, kernel->argument_bytes,
                                              kernel->n_blocks});
  } else if (const auto* work = std::get_if<simulator::Work>(&task.content)) {
    runner.perform(*work);
  } else if (const auto* event = std::get_if<EventContent>(&task.content)) {
    if (!event->is_external) return;
    event->event->is_set = task.type == kTaskEventRecord;
    event->event->set_ns = runner.stream_ns();
  } else if (const auto* value = std::get_if<ValueContent>(&task.content)) {
    if (!is_accessible(state, value->address, sizeof value->value)) {
      runner.fail(Status::kIllegalAddress);
    } else {
      *reinterpret_cast<std::uint64_t*>(value->address) = value->value;
    }
  } else if (const auto* condition = std::get_if<ConditionContent>(&task.content)) {
    perform(state, *condition->condition, runner);
  }
}

namespace {

bool holds(Runtime& state, const ValueContent& wanted) {
  if (!is_accessible(state, wanted.address, sizeof wanted.value)) return false;
  const std::uint64_t value = *reinterpret_cast<const std::uint64_t*>(wanted.address);
  switch (wanted.flag) {
    case kWaitValueGreaterOrEqual:
      return value >= wanted.value;
    case kWaitValueEqual:
      return value == wanted.value;
    case kWaitValueAnd:
      return (value & wanted.value) != 0;
    default:
      return ~(value | wanted.value) != 0;
  }
}

}  // namespace

simulator::Operation operation_of(Runtime& state, const std::shared_ptr<Task>& task) {
  if (task->type == kTaskEventWait) {
    const auto event = std::get<EventContent>(task->content).event;
    return Gate{[task, event] { return task->is_disabled || event->is_set; },
                [event] { return event->set_ns; }};
  }
  if (task->type == kTaskValueWait) {
    return Gate{[&state, task] {
      return task->is_disabled || holds(state, std::get<ValueContent>(task->content));
    }};
  }
  return simulator::Work(
      LateWork{[&state, task](Runner& runner) { perform(state, *task, runner); }});
}

namespace {

void reissue(GroupUpdate& update, const std::shared_ptr<Task>& task) {
  refuse_unless(task->type == kTaskKernel, kRtTaskTypeNotSupport,
                "an update takes kernels of the AI core only");
  refuse_unless(update.contents.size() < update.targets.size(), kRtInternalError,
                "the update has more tasks than the group");
  update.contents.push_back(task->content);
}

void add_to_part(Runtime& state, const std::shared_ptr<ModelState>& model, ModelStream& part,
                 const std::shared_ptr<Task>& task) {
  refuse_unless(model->phase == ModelState::Phase::kBuilding, kRtStreamModel,
                "the stream is bound to a model that is complete");
  // The limit cannot be extended, not even by ACL_STREAM_HUGE (hicann/runtime,
  // StarsAddTaskToStream).
  refuse_unless(part.tasks.size() < state.settings.bound_depth, kRtStreamTaskFull,
                "a stream that is bound to a model is full");
  task->id = model->n_tasks++;
  task->model = model;
  part.tasks.push_back(state.tasks.add(task));
}

}  // namespace

void submit(Runtime& state, const std::shared_ptr<StreamState>& stream,
            const std::shared_ptr<Task>& task) {
  if (const auto fault = state.device.scheduler.fault()) throw simulator::DeviceError(*fault);
  if (const auto* work = std::get_if<simulator::Work>(&task->content)) {
    state.device.graphs.validate(*work);
  }
  const auto model = stream->model.lock();
  if (stream->update != nullptr) {
    reissue(*stream->update, task);
  } else if (stream->capture != nullptr) {
    add_to_capture(state, stream, task);
  } else if (model != nullptr) {
    add_to_part(state, model, *stream->part.lock(), task);
  } else {
    state.device.scheduler.enqueue(*stream->queue, operation_of(state, task));
  }
}

void submit(Runtime& state, const std::shared_ptr<StreamState>& stream, simulator::Work work) {
  submit(state, stream, make_task(kTaskDefault, std::move(work)));
}

bool ModelState::is_running() {
  executions.erase(std::remove_if(executions.begin(), executions.end(),
                                  [](const auto& mark) { return mark->done; }),
                   executions.end());
  return !executions.empty();
}

std::shared_ptr<ModelState> make_model(Runtime& state, bool is_captured) {
  auto model = std::make_shared<ModelState>();
  model->is_captured = is_captured;
  model->id = state.next_model_id++;
  model->context = current_context();
  model->phase = is_captured ? ModelState::Phase::kCapturing : ModelState::Phase::kBuilding;
  return state.models.add(std::move(model));
}

std::shared_ptr<ModelState> model_of(Runtime& state, Model model) {
  const auto found = state.models.find(as_number(model));
  refuse_unless(found != nullptr, kRtParamInvalid, "no model has this handle");
  return found;
}

void remove_model(Runtime& state, const std::shared_ptr<ModelState>& model) {
  for (const auto& condition : model->conditions) {
    for (const auto& sub_graph : condition->sub_graphs) remove_model(state, sub_graph);
    state.conditions.remove(condition->handle);
  }
  model->conditions.clear();
  for (const auto& part : model->parts) {
    for (const auto& task : part->tasks) state.tasks.remove(task->handle);
    const auto stream = part->stream;
    if (model->is_captured) {
      remove_stream(state, *stream);
    } else if (stream != nullptr) {
      stream->model.reset();
      stream->part.reset();
    }
  }
  model->parts.clear();
  if (model->inner != nullptr) remove_stream(state, *model->inner);
  state.models.remove(model->handle);
}

namespace {

// The state of one execution.
struct Execution {
  std::map<const Task*, std::shared_ptr<Mark>> records;
  std::map<const ModelStream*, std::shared_ptr<Mark>> starts;
  std::vector<std::shared_ptr<Mark>> ends;
};

std::shared_ptr<Mark> make_mark(const ModelStream& part) {
  auto mark = std::make_shared<Mark>();
  mark->stream = part.stream->queue.get();
  return mark;
}

// The heads, and the streams that their tasks start: those that run.
std::vector<std::shared_ptr<ModelStream>> running_parts(const ModelState& model,
                                                        Execution& execution) {
  std::vector<std::shared_ptr<ModelStream>> result;
  for (const auto& part : model.parts) {
    if (part->is_head) result.push_back(part);
  }
  for (std::size_t index = 0; index < result.size(); ++index) {
    for (const auto& task : result[index]->tasks) {
      const auto* activate = std::get_if<ActivateContent>(&task->content);
      const auto started = activate == nullptr ? nullptr : activate->part.lock();
      if (started == nullptr || started->is_head || execution.starts.count(started.get()) != 0) {
        continue;
      }
      execution.starts[started.get()] = make_mark(*result[index]);
      result.push_back(started);
    }
  }
  return result;
}

void add_marks(const std::vector<std::shared_ptr<ModelStream>>& parts, bool is_captured,
               Execution& execution) {
  for (const auto& part : parts) {
    for (const auto& task : part->tasks) {
      const auto* event = std::get_if<EventContent>(&task->content);
      if (event != nullptr && !event->is_external && task->type == kTaskEventRecord) {
        execution.records[task.get()] = make_mark(*part);
      }
      if (std::holds_alternative<EndContent>(task->content)) {
        const auto end = make_mark(*part);
        execution.records[task.get()] = end;
        execution.ends.push_back(end);
      }
    }
    if (is_captured) execution.ends.push_back(make_mark(*part));
  }
}

void enqueue(Runtime& state, const std::shared_ptr<ModelStream>& part,
             const std::shared_ptr<Task>& task, const Execution& execution) {
  auto& scheduler = state.device.scheduler;
  simulator::Stream& queue = *part->stream->queue;
  const auto* event = std::get_if<EventContent>(&task->content);
  const auto own = execution.records.find(task.get());
  if (own != execution.records.end()) {
    scheduler.enqueue(queue, Record{own->second});
  } else if (event != nullptr && !event->is_external && task->type == kTaskEventWait) {
    const auto awaited = execution.records.find(event->record.get());
    if (awaited != execution.records.end()) scheduler.enqueue(queue, Wait{awaited->second});
  } else if (const auto* activate = std::get_if<ActivateContent>(&task->content)) {
    const auto mark = execution.starts.find(activate->part.lock().get());
    if (mark != execution.starts.end() && !mark->second->done) {
      scheduler.enqueue(queue, Record{mark->second});
    }
  } else {
    scheduler.enqueue(queue, operation_of(state, task));
  }
}

}  // namespace

void execute(Runtime& state, const std::shared_ptr<ModelState>& model, StreamState& stream) {
  auto& scheduler = state.device.scheduler;
  if (const auto fault = scheduler.fault()) throw simulator::DeviceError(*fault);
  model->is_running();  // forgets ended executions
  const auto earlier = model->executions;
  scheduler.enqueue(*stream.queue, simulator::Work(LateWork{[earlier](Runner& runner) {
    for (const auto& mark : earlier) {
      if (!mark->done) runner.fail(Status::kOverlap);
    }
  }}));
  scheduler.enqueue(*stream.queue,
                    simulator::Work(LateWork{[model](Runner&) { assign_defaults(*model); }}));
  const auto begin = scheduler.record(*stream.queue);
  Execution execution;
  const auto parts = running_parts(*model, execution);
  add_marks(parts, model->is_captured, execution);
  std::size_t n_ended = 0;
  for (const auto& part : parts) {
    const auto started = execution.starts.find(part.get());
    scheduler.enqueue(*part->stream->queue,
                      Wait{started == execution.starts.end() ? begin : started->second});
    for (const auto& task : part->tasks) enqueue(state, part, task, execution);
    if (model->is_captured) {
      scheduler.enqueue(*part->stream->queue, Record{execution.ends[n_ended++]});
    }
  }
  // One stream runs first wherever it may, so that a missing event shows.
  if (!state.settings.first_stream_first) {
    std::reverse(execution.ends.begin(), execution.ends.end());
  }
  for (const auto& end : execution.ends) scheduler.enqueue(*stream.queue, Wait{end});
  model->executions.push_back(scheduler.record(*stream.queue));
}

}  // namespace simulated_ascend
