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
  std::vector<LaunchAttribute> attributes;
};

struct EventContent {
  std::shared_ptr<EventState> event;
  std::uint32_t flag = 0;
  bool is_external = false;
  std::shared_ptr<Task> record;  // of a wait: what it waits for
};

struct ValueContent {
  std::uint64_t address = 0, value = 0;
  std::uint32_t flag = 0;
};

struct ActivateContent {  // starts another stream of the model
  std::weak_ptr<ModelStream> part;
};

struct EndContent {};  // the model's execution is over

using TaskContent = std::variant<KernelContent, simulator::Work, EventContent, ValueContent,
                                 ActivateContent, EndContent>;

// What a stream can be told to do. In a model it stays and may change; elsewhere it goes when it
// ran.
struct Task {
  std::uint64_t handle = 0;  // 0: in no model
  ModelTaskType type = kTaskDefault;
  TaskContent content;
  bool is_disabled = false;
  std::uint32_t id = 0;  // its number in the model
  std::uint64_t group = 0;
  std::weak_ptr<ModelState> model;
  // What TaskSetParams and TaskDisable asked for, until the model is updated.
  std::optional<TaskContent> pending_content;
  bool pending_disable = false;
};

// One stream of a model.
struct ModelStream {
  std::shared_ptr<StreamState> stream;
  std::vector<std::shared_ptr<Task>> tasks;
  bool is_head = true;  // begins with the execution, rather than when another stream starts it
};

struct ModelState {
  enum class Phase { kCapturing, kBuilding, kReady };

  std::uint64_t handle = 0;
  std::uint32_t id = 0;
  bool is_captured = false;
  Phase phase = Phase::kReady;
  std::string name;
  std::weak_ptr<ContextState> context;
  std::vector<std::shared_ptr<ModelStream>> parts;
  std::uint32_t n_tasks = 0;
  std::map<std::uint64_t, std::vector<std::shared_ptr<Task>>> groups;  // by handle
  std::vector<std::pair<HostFunction, void*>> on_destroy;
  std::vector<std::shared_ptr<simulator::Mark>> executions;  // ends of those that may go on
  std::shared_ptr<StreamState> inner;                        // where Execute runs it

  bool is_running();
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

// The tasks that are issued anew for a group.
struct GroupUpdate {
  std::vector<std::shared_ptr<Task>> targets;
  std::vector<TaskContent> contents;
};

std::shared_ptr<Task> make_task(ModelTaskType type, TaskContent content);

// Does the task on the stream, or adds it to the stream's capture, the model that it is bound to,
// or the update that is open on it. Errors: those of a capture; the device's fault.
void submit(Runtime& state, const std::shared_ptr<StreamState>& stream,
            const std::shared_ptr<Task>& task);
void submit(Runtime& state, const std::shared_ptr<StreamState>& stream, simulator::Work work);
// The task as an operation: outside of models, and where it waits for nothing of its own model.
simulator::Operation operation_of(Runtime& state, const std::shared_ptr<Task>& task);

// Adds a task to the stream's part of its capture. Errors: 507903, those of groups, and 207008
// where the stream is full and the device has no other: then the capture is invalid.
void add_to_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                    const std::shared_ptr<Task>& task);
void join_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                  const std::shared_ptr<Capture>& capture);
void record_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                       const std::shared_ptr<EventState>& event, bool is_external);
void wait_in_capture(Runtime& state, const std::shared_ptr<StreamState>& stream,
                     const std::shared_ptr<EventState>& event, bool is_external);

std::shared_ptr<ModelState> make_model(Runtime& state, bool is_captured);
std::shared_ptr<ModelState> model_of(Runtime& state, Model model);
// Its tasks and streams go; streams that were bound to it are the caller's again.
void remove_model(Runtime& state, const std::shared_ptr<ModelState>& model);
// Queues one execution after what the stream holds. Two executions that nothing orders are a fault.
void execute(Runtime& state, const std::shared_ptr<ModelState>& model, StreamState& stream);

// As call(), for functions that give a stream something to do: a planned failure then counts as a
// failed submission, which invalidates the stream's capture. `body` gets the stream as well.
template <class Body>
int call_on(const char* function, Stream handle, const Body& body) noexcept {
  if (simulator::is_inside_work()) return tell(function, kAclInternalError, "called by a kernel");
  try {
    Runtime& state = runtime();
    const std::lock_guard lock(state.device.mutex);
    if (const auto code = state.device.ledger.note(function)) {
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
