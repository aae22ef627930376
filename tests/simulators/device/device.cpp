#include "device.hpp"

namespace simulator {

// Nothing may be enqueued on the default stream while a stream ordered with it captures.
void Device::require_usable(Stream& stream) {
  if (scheduler.is_default(stream)) captures.require_default_usable();
}

void Device::submit(Stream& stream, Work work) {
  require_usable(stream);
  graphs.validate(work);
  if (stream.capture != nullptr) {
    captures.add(stream, std::move(work));
  } else {
    scheduler.enqueue(stream, std::move(work));
  }
}

void Device::launch(Stream& stream, Executable& executable) {
  require_usable(stream);
  if (stream.capture != nullptr) {
    captures.add(stream, ChildGraph{std::make_shared<const GraphRun>(executable.run)});
    return;
  }
  if (executable.last != nullptr) scheduler.wait(stream, executable.last);
  GraphRun run = executable.run;
  run.order = graphs.order(executable);
  run.dependencies = executable.dependencies;
  for (const auto& step : run.steps) {
    const auto* const record = std::get_if<EventRecord>(&step->work);
    if (record == nullptr) continue;
    const auto mark = std::make_shared<Mark>();
    mark->stream = &stream;
    const auto event = events.get(record->event, Status::kInvalidHandle);
    event->capture.reset();
    event->frontier.clear();
    event->mark = run.marks[record->event] = mark;
  }
  scheduler.enqueue(stream, std::move(run));
  executable.last = scheduler.record(stream);
}

void Device::record(Stream& stream, Event& event) {
  require_usable(stream);
  if (stream.capture != nullptr) {
    captures.record(stream, event);
    return;
  }
  event.capture.reset();
  event.frontier.clear();
  event.mark = scheduler.record(stream);
}

void Device::wait(Stream& stream, Event& event) {
  require_usable(stream);
  if (stream.capture != nullptr || event.capture != nullptr) {
    captures.wait(stream, event);
  } else if (event.mark != nullptr) {
    scheduler.wait(stream, event.mark);
  }
}

void Device::destroy_stream(std::uint64_t handle) {
  const auto stream = scheduler.get(handle);
  captures.require_not_capturing(*stream);
  scheduler.run(stream);
  scheduler.remove(handle);
}

std::shared_ptr<Kernel> Device::kernel(std::uint64_t handle) const {
  if (auto found = kernels.find(handle)) return found;
  for (const auto& kernel : kernels.all()) {
    if (kernel->library_handle == handle) return kernel;
  }
  throw DeviceError(Status::kInvalidHandle);
}

void Device::add_kernel(std::shared_ptr<Kernel> kernel) {
  kernel->library_handle = new_handle();
  kernel->is_loaded = !loads_late;
  kernels.add(std::move(kernel));
}

void Device::load(Kernel& kernel) {
  if (kernel.is_loaded) return;
  captures.require_safe();
  kernel.is_loaded = true;
}

bool Device::reset() {
  if (scheduler.is_executing()) return false;
  scheduler.reset();
  captures.reset();
  graphs.reset();
  events.clear();
  modules.clear();
  kernels.clear();
  memory.reset();
  ledger.reset();
  loads_late = false;
  return true;
}

}  // namespace simulator
