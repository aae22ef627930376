#include "streams.hpp"

#include <algorithm>
#include <chrono>

namespace simulator {
namespace {

thread_local bool inside_work = false;
thread_local Dimensions grid_here;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Releases the device's mutex while foreign code runs, which may wait for another thread that needs
// the device.
class OutsideLock {
 public:
  explicit OutsideLock(std::mutex& device) : device_(device) {
    device_.unlock();
    inside_work = true;
  }
  ~OutsideLock() {
    inside_work = false;
    device_.lock();
  }
  OutsideLock(const OutsideLock&) = delete;
  OutsideLock& operator=(const OutsideLock&) = delete;

 private:
  std::mutex& device_;
};

}  // namespace

bool is_inside_work() { return inside_work; }

Dimensions running_grid() { return grid_here; }

// Makes the calling thread the one that runs work.
class Scheduler::Execution {
 public:
  explicit Execution(Scheduler& scheduler) : scheduler_(scheduler) {
    scheduler_.ended_.wait(scheduler_.device_, [this] { return !scheduler_.executing_; });
    scheduler_.executing_ = true;
  }
  ~Execution() {
    scheduler_.executing_ = false;
    scheduler_.ended_.notify_all();
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

 private:
  Scheduler& scheduler_;
};

Scheduler::Scheduler(std::mutex& device, Memory& memory, Graphs& graphs)
    : device_(device),
      memory_(memory),
      graphs_(graphs),
      default_(std::make_shared<Stream>()),
      thread_default_(std::make_shared<Stream>()) {}

std::shared_ptr<Stream> Scheduler::create(bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->blocking = blocking;
  return streams_.add(std::move(stream));
}

std::shared_ptr<Stream> Scheduler::get(std::uint64_t handle) const {
  constexpr std::uint64_t kDefault = 1, kThreadDefault = 2;
  if (handle <= kDefault) return default_;
  if (handle == kThreadDefault) return thread_default_;
  return streams_.get(handle, Status::kInvalidHandle);
}

std::vector<std::shared_ptr<Stream>> Scheduler::all() const {
  auto result = streams_.all();
  result.push_back(default_);
  result.push_back(thread_default_);
  return result;
}

std::shared_ptr<Mark> Scheduler::tail(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = &stream;
  stream.queue.push_back(Record{mark});
  return mark;
}

// Work enqueued from here on does not begin before the host's time.
void Scheduler::tell_time(Stream& stream) {
  if (!clock_ || stream.told_ns >= host_ns_) return;
  stream.told_ns = host_ns_;
  stream.queue.push_back(Wait{std::make_shared<Mark>(Mark{true, host_ns_, nullptr})});
}

void Scheduler::host_saw(std::int64_t moment_ns) { host_ns_ = std::max(host_ns_, moment_ns); }

std::int64_t Scheduler::read_clock(std::int64_t virtual_ns) const {
  return clock_ ? virtual_ns : now_ns();
}

void Scheduler::set_copy_ns(std::uint64_t to, std::int64_t duration_ns) {
  require(clock_.has_value(), Status::kInvalidValue);
  clock_->copy_to_ns[to] = duration_ns;
}

std::int64_t Scheduler::duration_ns(const Work& work) const {
  if (!clock_) return 0;
  if (const auto* const call = std::get_if<KernelCall>(&work); call != nullptr) {
    return call->is_prologue ? 0 : clock_->kernel_ns;
  }
  if (std::holds_alternative<BlockKernelCall>(work)) return clock_->kernel_ns;
  const auto* const copy = std::get_if<Copy>(&work);
  if (copy == nullptr) return 0;
  const auto found = clock_->copy_to_ns.find(copy->destination.at(0, 0));
  return found == clock_->copy_to_ns.end() ? clock_->copy_ns : found->second;
}

void Scheduler::enqueue(Stream& stream, Operation operation) {
  tell_time(stream);
  if (is_default(stream)) {
    for (const auto& other : all()) {
      if (!other->blocking || other == default_ || other->queue.empty()) continue;
      stream.queue.push_back(Wait{tail(*other)});
    }
  } else if (stream.blocking && !default_->queue.empty()) {
    stream.queue.push_back(Wait{tail(*default_)});
  }
  stream.queue.push_back(std::move(operation));
  if (eager_) {
    const Execution execution(*this);
    advance(stream, nullptr);
  }
}

std::shared_ptr<Mark> Scheduler::record(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = &stream;
  enqueue(stream, Record{mark});
  return mark;
}

void Scheduler::wait(Stream& stream, std::shared_ptr<Mark> mark) {
  if (!mark->done || clock_) enqueue(stream, Wait{std::move(mark)});
}

void Scheduler::advance(Stream& stream, const Mark* until) {
  while (!stream.queue.empty() && (until == nullptr || !until->done)) {
    if (!step(stream)) return;
  }
}

bool Scheduler::step(Stream& stream) {
  if (stream.advancing || stream.queue.empty()) return false;  // already running in a caller
  stream.advancing = true;
  const bool passed = pass(stream);
  if (passed && !stream.queue.empty()) {  // empty: a fault dropped it
    perform_first(stream);
    if (fault_) drop_all();
  }
  stream.advancing = false;
  return passed;
}

void Scheduler::perform_first(Stream& stream) {
  if (auto* run = std::get_if<GraphRun>(&stream.queue.front())) {
    if (!advance_graph(stream, *run)) stream.queue.pop_front();
    return;
  }
  const Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  perform(stream, operation);
}

// The event that the stream's first operation waits for has happened.
bool Scheduler::pass(Stream& stream) {
  if (const auto* wait = std::get_if<Wait>(&stream.queue.front())) {
    const auto mark = wait->mark;
    if (!mark->done) advance(*mark->stream, mark.get());
    return mark->done;
  }
  if (const auto* gate = std::get_if<Gate>(&stream.queue.front())) {
    const Gate copy = *gate;
    return open(copy);
  }
  return true;
}

// Lets other streams advance, one operation at a time, only until the gate opens; of streams that
// do not wait, the oldest or the newest first.
bool Scheduler::open(const Gate& gate) {
  while (!fault_) {
    if (gate.is_open()) return true;
    if (!step_any(/*waiting=*/false) && !step_any(/*waiting=*/true)) return false;
  }
  return true;  // nothing can run any more
}

bool Scheduler::step_any(bool waiting) {
  auto streams = all();
  if (newest_first_) std::reverse(streams.begin(), streams.end());
  for (const auto& stream : streams) {
    if (stream->queue.empty()) continue;
    const auto* wait = std::get_if<Wait>(&stream->queue.front());
    if ((wait != nullptr && !wait->mark->done) == waiting && step(*stream)) return true;
  }
  return false;
}

std::size_t Scheduler::n_queued() const {
  std::size_t count = 0;
  for (const auto& stream : all()) count += stream->queue.size();
  return count;
}

// Runs one node, so that a graph runs only as far as a wait requires; false if there is none left.
bool Scheduler::advance_graph(Stream& stream, GraphRun& run) {
  if (run.next == run.order.size()) return false;
  if (run.next == 0) {
    run.begin_ns = stream.now_ns;
    run.ended_ns.resize(run.steps.size());
  }
  const std::size_t index = run.order[run.next++];
  const auto step = run.steps[index];  // a fault may drop the run meanwhile
  std::int64_t at_ns = run.begin_ns;
  for (const std::size_t before : run.dependencies[index]) {
    at_ns = std::max(at_ns, run.ended_ns[before]);
  }
  at_ns += duration_ns(step->work);
  run.ended_ns[index] = at_ns;
  stream.now_ns = std::max(stream.now_ns, at_ns);
  if (const auto* record = std::get_if<EventRecord>(&step->work)) {
    const auto mark = run.marks.at(record->event);
    mark->at_ns = read_clock(at_ns);
    mark->done = true;
  } else {
    perform(*step);
  }
  return true;
}

void Scheduler::perform(Stream& stream, const Operation& operation) {
  if (const auto* work = std::get_if<Work>(&operation)) {
    current_ = &stream;
    perform(*work);
    current_ = nullptr;
  } else if (const auto* record = std::get_if<Record>(&operation)) {
    record->mark->at_ns = read_clock(stream.now_ns);
    record->mark->done = true;
  } else if (const auto* wait = std::get_if<Wait>(&operation)) {
    stream.now_ns = std::max(stream.now_ns, wait->mark->at_ns);
  } else if (const auto* gate = std::get_if<Gate>(&operation); gate->opened_ns != nullptr) {
    stream.now_ns = std::max(stream.now_ns, gate->opened_ns());
  }
}

void Scheduler::perform(const Work& work) {
  if (current_ != nullptr) current_->now_ns += duration_ns(work);
  if (const auto* call = std::get_if<KernelCall>(&work)) {
    const Kernel& kernel = *call->kernel;
    int result = 0;
    {
      const OutsideLock outside(device_);
      grid_here = call->grid;
      if (kernel.prologue != nullptr && !call->is_without_prologue) {
        result = kernel.prologue(call->arguments.data(), kernel.prologue_user);
      }
      if (result == 0 && !call->is_prologue) {
        result = kernel.function(call->arguments.data(), kernel.user);
      }
    }
    if (result != 0) fault_ = Status::kLaunchFailed;
  } else if (const auto* host = std::get_if<HostCall>(&work)) {
    const OutsideLock outside(device_);
    host->function(host->user);
  } else if (const auto* child = std::get_if<ChildGraph>(&work)) {
    perform(*child->run);
  } else if (const auto* late = std::get_if<LateWork>(&work)) {
    late->run(*this);
  } else if (const auto* block = std::get_if<BlockKernelCall>(&work)) {
    perform(*block);
  } else {
    try {
      graphs_.validate(work);  // memory allocated at the call may be freed now
    } catch (const DeviceError&) {
      fault_ = Status::kIllegalAddress;
      return;
    }
    if (const auto* copy = std::get_if<Copy>(&work)) {
      if (copies_to_fault_ > 0 && --copies_to_fault_ == 0) {
        fault_ = Status::kIllegalAddress;
        return;
      }
      if (copy->source.side == Side::kHost && copy->staged.empty()) {
        bytes_from_host_ += copy->width_bytes * copy->height * copy->depth;
      }
      simulator::run(*copy);
    }
    if (const auto* fill = std::get_if<Fill>(&work)) simulator::run(*fill);
  }
}

void Scheduler::perform(const BlockKernelCall& call) {
  const bool readable =
      call.argument_bytes == 0 || !memory_.covering(call.arguments, call.argument_bytes).empty();
  int result = 1;
  if (readable) {
    const OutsideLock outside(device_);
    result = call.function(reinterpret_cast<const void*>(call.arguments), call.argument_bytes,
                           call.n_blocks, call.user);
  }
  if (result != 0) fault_ = Status::kLaunchFailed;
}

void Scheduler::perform(const GraphRun& run) {
  for (const std::size_t index : run.order) {
    perform(*run.steps[index]);
    if (fault_) return;
  }
}

void Scheduler::perform(const Step& step) {
  if (!graphs_.holds(step)) fault_ = Status::kIllegalAddress;
  if (!fault_) perform(step.work);
}

bool Scheduler::is_idle(const Stream& stream) const {
  if (!is_default(stream)) return stream.queue.empty();
  for (const auto& other : all()) {
    if (other->blocking && !other->queue.empty()) return false;
  }
  return true;
}

void Scheduler::run(const std::shared_ptr<Stream>& stream) {
  if (is_default(*stream)) record(*stream);
  {
    const Execution execution(*this);
    advance(*stream, nullptr);
  }
  if (fault_) throw DeviceError(*fault_);
  require(stream->queue.empty(), Status::kBlocked);
  host_saw(stream->now_ns);
}

void Scheduler::run_until(const std::shared_ptr<Mark>& mark) {
  {
    const Execution execution(*this);
    if (!mark->done) advance(*mark->stream, mark.get());
  }
  if (fault_) throw DeviceError(*fault_);
  require(mark->done, Status::kBlocked);
  if (clock_) host_saw(mark->at_ns);
}

void Scheduler::run_all() {
  {
    const Execution execution(*this);
    std::size_t before = 0;
    do {
      before = n_queued();
      for (const auto& stream : all()) advance(*stream, nullptr);
    } while (n_queued() != 0 && n_queued() != before);
  }
  if (fault_) throw DeviceError(*fault_);
  require(n_queued() == 0, Status::kBlocked);
  for (const auto& stream : all()) host_saw(stream->now_ns);
}

void Scheduler::set_fault(Status status) {
  fault_ = status;
  drop_all();
}

// Nothing queued runs after a fault, and nothing waits for it.
void Scheduler::drop_all() {
  for (const auto& stream : all()) drop(*stream);
}

void Scheduler::drop(Stream& stream) {
  for (const Operation& operation : stream.queue) {
    if (const auto* record = std::get_if<Record>(&operation)) record->mark->done = true;
  }
  stream.queue.clear();
}

void Scheduler::set_eager(bool eager) {
  eager_ = eager;
  if (eager && !executing_ && !fault_) run_all();
}

void Scheduler::reset() {
  require(!executing_, Status::kNotReady);
  newest_first_ = false;
  clock_.reset();
  host_ns_ = 0;
  drop_all();
  streams_.clear();
  for (const auto& stream : {default_, thread_default_}) {
    stream->capture.reset();
    stream->frontier.clear();
    stream->now_ns = stream->told_ns = 0;
  }
  eager_ = false;
  copies_to_fault_ = bytes_from_host_ = 0;
  fault_.reset();
}

}  // namespace simulator
