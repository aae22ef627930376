// Models of the device: streams of tasks, captured or built, that are executed as one task.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "runtime.hpp"

namespace simulated_ascend {

struct KernelContent {
  std::shared_ptr<const FunctionState> function;
  std::uint32_t n_blocks = 1;
  std::uint64_t arguments = 0;  // in device memory, where they are read when the kernel runs
  std::size_t argument_bytes = 0;
  std::shared_ptr<const ArgumentBlock> block;  // null: the arguments are the caller's
  std::uint64_t allocation = 0;  // that holds the caller's, by its id; 0: none, or a mapping
  std::vector<LaunchAttribute> attributes;
};

struct EventContent {
  std::shared_ptr<EventState> event;
  std::uint32_t flag = 0;
  bool is_external = false;
  std::shared_ptr<Task> record;  // of a wait: the record that it waits for
};

struct ValueContent {
  std::uint64_t address = 0, value = 0;
  std::uint32_t flag = 0;
};

struct ActivateContent {  // starts another stream of the model
  std::weak_ptr<ModelStream> part;
};

struct EndContent {};  // the model's execution has ended

struct ConditionContent {  // executes sub graphs, by a value on the device
  std::shared_ptr<const ConditionState> condition;
};

using TaskContent = std::variant<KernelContent, simulator::Work, EventContent, ValueContent,
                                 ActivateContent, EndContent, ConditionContent>;

// Arguments that stay in the caller's memory: the runtime keeps the address and copies nothing.
void keep_arguments(Runtime& state, const void* arguments, KernelContent& kernel);

// A unit of work of a stream. In a model it stays and may change; elsewhere it is removed once it
// ran.
struct Task {
  std::uint64_t handle = 0;  // 0: in no model
  ModelTaskType type = kTaskDefault;
  TaskContent content;
  bool is_disabled = false;
  std::uint32_t id = 0;  // its number in the model
  std::uint64_t group = 0;
  std::weak_ptr<ModelState> model;
  // Requested by TaskSetParams and TaskDisable, until the model is updated.
  std::optional<TaskContent> pending_content;
  bool pending_disable = false;
};

// One stream of a model.
struct ModelStream {
  std::shared_ptr<StreamState> stream;
  std::vector<std::shared_ptr<Task>> tasks;
  bool is_head = true;  // begins with the execution, not started by another stream
};

struct ModelState {
  // A sub graph waits for its capture, and becomes invalid if that is dropped.
  enum class Phase { kAwaitingCapture, kCapturing, kDropped, kBuilding, kReady };

  std::uint64_t handle = 0;
  std::uint32_t id = 0;
  bool is_captured = false;
  // Requested changes wait for the update; after a refused change the model is unusable (UPDATING
  // and FAULT of hicann/runtime's RtCaptureModelStatus).
  bool is_updating = false, is_faulty = false;
  Phase phase = Phase::kReady;
  std::string name;
  std::weak_ptr<ContextState> context;
  std::vector<std::shared_ptr<ModelStream>> parts;
  std::uint32_t n_tasks = 0;
  std::map<std::uint64_t, std::vector<std::shared_ptr<Task>>> groups;  // by handle
  std::vector<std::pair<HostFunction, void*>> on_destroy;
  std::vector<std::shared_ptr<simulator::Mark>> executions;  // ends of those that may still run
  std::shared_ptr<StreamState> inner;                        // where Execute runs it
  std::vector<std::shared_ptr<ConditionState>> conditions;   // made on it
  std::weak_ptr<ConditionState> sub_graph_of;                // null: an independent model

  bool is_sub_graph() const { return !sub_graph_of.expired(); }

  bool is_running();
};

// A value in device memory, and the sub graphs of the single task that reads it. Sub graphs are
// models that are removed with the model that the condition was made on. Source: the runtime's
// docs/zh/design/features/aclgraph.md, 2.5 and 4.2 (CondHandle).
struct ConditionState {
  std::uint64_t handle = 0;
  std::weak_ptr<ModelState> model;
  std::shared_ptr<const ArgumentBlock> value;  // of eight bytes
  std::uint32_t default_value = 0;
  bool assigns_default = false;  // when an execution begins
  bool is_used = false;          // by a task
  ModelConditionType type = kConditionIf;
  std::vector<std::shared_ptr<ModelState>> sub_graphs;
};

struct Capture {
  std::uint64_t handle = 0;
  CaptureMode mode = kCaptureGlobal;
  std::thread::id thread;
  std::weak_ptr<ContextState> context;
  std::shared_ptr<ModelState> model;
  const StreamState* origin = nullptr;
  bool is_invalidated = false;
  std::map<const StreamState*, std::shared_ptr<ModelStream>> parts;
  std::map<const StreamState*, Progress> progress;
  const StreamState* group_on = nullptr;  // the stream whose group is open
  std::vector<std::shared_ptr<Task>> group;
};

// The tasks that are issued again for a group.
struct GroupUpdate {
  std::vector<std::shared_ptr<Task>> targets;
  std::vector<TaskContent> contents;
};

std::shared_ptr<Task> make_task(ModelTaskType type, TaskContent content);

// Runs the task on the stream, or adds it to the stream's capture, to the model that it is bound
// to, or to its open update. Errors: those of a capture; the device's fault.
void submit(Runtime& state, const std::shared_ptr<StreamState>& stream,
            const std::shared_ptr<Task>& task);
void submit(Runtime& state, const std::shared_ptr<StreamState>& stream, simulator::Work work);
// The task as an operation: outside models, and where it waits for nothing of its own model.
simulator::Operation operation_of(Runtime& state, const std::shared_ptr<Task>& task);

// Adds a task to the stream's part of its capture. Errors: 507903, those of groups, and 207008
// where the stream is full and the device has no other: then the capture is invalid.
void add_to_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                    const std::shared_ptr<Task>& task);
void join_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                  const std::shared_ptr<Capture>& capture);
// `flag`: the call's own, 0 or EXTERNAL.
void record_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                       const std::shared_ptr<EventState>& event, bool is_external,
                       std::uint32_t flag);
void wait_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                     const std::shared_ptr<EventState>& event, bool is_external,
                     std::uint32_t flag);

std::shared_ptr<ModelState> make_model(Runtime& state, bool is_captured);
// Begins to capture the stream into the model, which is its origin's. Errors: those of joining.
void begin_capture(Runtime& state, const std::shared_ptr<StreamState>& stream, CaptureMode mode,
                   const std::shared_ptr<ModelState>& model);
// A stream that may begin a capture. Errors: 107000, 107003, 107005, 107027, 207000, 507000.
std::shared_ptr<StreamState> capturable_stream(Runtime& state, Stream handle, CaptureMode mode);
// Whether every sub graph of the model, and of these, was captured to its end.
bool are_sub_graphs_complete(const ModelState& model);
// Assigns the default values of the conditions of the model and its sub graphs, where requested.
void assign_defaults(const ModelState& model);
// Executes the sub graphs selected by the condition's value. Errors: the device's fault.
void perform(Runtime& state, const ConditionState& condition, simulator::Runner& runner);
// Runs one task of a model; waits for other tasks of the same model are no-ops.
void perform(Runtime& state, const Task& task, simulator::Runner& runner);
std::shared_ptr<ModelState> model_of(Runtime& state, Model model);
// Removes its tasks and streams; streams that were bound to it are the caller's again.
void remove_model(Runtime& state, const std::shared_ptr<ModelState>& model);
// Queues one execution after the stream's work. Two unordered executions are a fault.
void execute(Runtime& state, const std::shared_ptr<ModelState>& model, StreamState& stream);

// As call(), for functions that enqueue work on a stream: a planned failure then counts as a failed
// submission, which invalidates the stream's capture. `body` gets the stream as well.
template <class Body>
int call_on(const char* function, Stream handle, const Body& body) noexcept {
  if (simulator::is_inside_work()) return tell(function, kAclInternalError, "called by a kernel");
  try {
    Runtime& state = runtime();
    const std::lock_guard lock(state.device.mutex);
    if (const auto code = note(state, function)) {
      const auto found = state.streams.find(as_number(handle));
      if (found != state.streams.end() && found->second->capture != nullptr) {
        found->second->capture->is_invalidated = true;
      }
      return tell(function, *code, "a failure that the test planned");
    }
    require(state, Needs::kContext);
    body(state, stream_of(state, handle));
    return kSuccess;
  } catch (...) {
    return tell_exception(function);
  }
}

}  // namespace simulated_ascend
