#include "ascend/ascend_resident.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

std::unique_ptr<TableRefresh> make_refresh(const Runtime& runtime, const AscendProgram& program) {
  if (const auto* const kernel = std::get_if<GatherKernel>(&program.refresh)) {
    return make_kernel_gather(runtime, program.table, *kernel);
  }
  return std::holds_alternative<GatheredByOperators>(program.refresh)
             ? make_operator_gather(runtime, program.table)
             : make_host_refresh(runtime, program.table);
}

}  // namespace

AscendResident::AscendResident(AscendProgram program)
    : StreamResident(program.device, program.copies_on_device),
      kernels_(std::move(program.kernels)) {
  if (kernels_.size() != program.table.blocks.size()) {
    throw std::invalid_argument("each kernel needs one block of arguments");
  }
  launch_kernels_.resize(program.n_launches);
  for (std::size_t kernel = 0; kernel < kernels_.size(); ++kernel) {
    if (kernels_[kernel].launch >= program.n_launches) {
      throw std::invalid_argument("a kernel names a launch that does not exist");
    }
    launch_kernels_[kernels_[kernel].launch].push_back(kernel);
    argument_bytes_.push_back(program.table.blocks[kernel].size());
  }
  const ContextScope scope(runtime(), device());
  const RelaxedCapture relaxed(runtime());
  try {
    make(program);
  } catch (...) {
    close();
    throw;
  }
}

AscendResident::~AscendResident() { close_for_good(); }

void AscendResident::make(const AscendProgram& program) {
  runtime().require(Capability::kKernelLaunch, "a resident program of kernels");
  refresh_ = make_refresh(runtime(), program);
  relocations_ = refresh_->relocations();
  arena_.emplace(runtime(), program.arena_bytes, "allocating the feature map");
  if (program.steps) {
    program.steps->weights()->attach(program.n_launches, program.for_next_pass);
    steps_ = program.steps;
  }
  const bool has_copies = steps_ && !steps_->weights()->copies().empty();
  form_ = program.form.value_or(has_copies ? ModelForm::kCapture : best_form(runtime()));
  try {
    make_model();
  } catch (const StreamIsFull&) {
    if (program.form || !runtime().has(Capability::kCapture)) throw;
    form_ = ModelForm::kCapture;  // whose full streams the runtime continues
    make_model();
  }
}

void AscendResident::make_model() {
  const bool has_copies = steps_ && !steps_->weights()->copies().empty();
  const auto launch = [&](Stream stream, Stream side) {
    for (std::size_t kernel = 0; kernel < kernels_.size(); ++kernel) {
      if (has_copies) steps_->before(kernel, stream, side);
      launch_kernel(kernel, stream);
    }
    if (has_copies) steps_->end(stream, side);
  };
  std::optional<Stream> side;
  if (has_copies) side = steps_->weights()->lane();
  model_.emplace(runtime(), form_, launch, side);
  streams_ = model_->streams();
}

void AscendResident::launch_kernel(std::size_t kernel, Stream stream) const {
  const Error error =
      runtime().launch_kernel(kernels_[kernel].function, kernels_[kernel].n_blocks,
                              refresh_->block(kernel), argument_bytes_[kernel], stream);
  if (error == kSuccess) return;
  const std::string what = "launching kernel " + std::to_string(kernel) + ", of launch " +
                           std::to_string(kernels_[kernel].launch);
  if (error == kRtStreamTaskFull) throw StreamIsFull(full_stream(runtime(), what));
  runtime().fail(error, what);
}

void AscendResident::patch(const std::vector<Patch>& patches) noexcept {
  if (refresh_) refresh_->patch(patches);
}

void AscendResident::heed_failure() {
  const bool timing_failed = steps_ && steps_->weights()->take_failure();
  if (!take_failure() && !timing_failed) return;
  refresh_->distrust();
  if (steps_) steps_->weights()->distrust();
}

void AscendResident::execute_model(Submission& submission) {
  if (steps_) return steps_->weights()->execute(model_->handle(), stream(), submission);
  runtime().check(runtime().model_execute_async(model_->handle(), stream()), "executing the model");
}

void AscendResident::execute(Submission& submission, LaunchTimes* times) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  note_enqueued();
  heed_failure();
  if (steps_ && steps_->weights()->begin_pass(stream())) submission.end_substage(kWeightsRead);
  refresh_->enqueue(stream(), submission);
  execute_model(submission);
  submission.end(kExecuteEnqueue);
  if (times == nullptr) return;
  std::fill(times->begin_ns.begin(), times->begin_ns.end(), submission.end_ns);
  std::fill(times->end_ns.begin(), times->end_ns.end(), submission.end_ns);
}

std::optional<OwnArena> AscendResident::arena() const {
  if (!arena_) return std::nullopt;
  return OwnArena{arena_->address()};
}

void AscendResident::issue(std::size_t launch) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  note_enqueued();
  heed_failure();
  if (steps_ && launch == 0) steps_->weights()->begin_pass(stream());
  Submission by_host;  // its measurements are not used
  refresh_->enqueue(stream(), by_host);
  if (steps_) steps_->weights()->issue_before(launch, stream());
  for (const std::size_t kernel : launch_kernels_.at(launch)) launch_kernel(kernel, stream());
}

// On a separate stream: the caller's may be being captured.
std::vector<LaunchTime> AscendResident::time_launches(LaunchTimer& timer) {
  refuse_closed();
  if (steps_) throw ExecutionError("launches are timed where no weight is streamed");
  const ContextScope scope(runtime(), device());
  const RelaxedCapture relaxed(runtime());
  const OwnStream stream(runtime(), 0);
  try {
    launch_timed(timer, stream.handle());
    return timer.take();
  } catch (...) {
    timer.settle();
    throw;
  }
}

void AscendResident::launch_timed(LaunchTimer& timer, Stream stream) {
  Submission untold;
  refresh_->enqueue(stream, untold);
  for (const std::vector<std::size_t>& kernels : launch_kernels_) {
    timer.before(stream);
    for (const std::size_t kernel : kernels) launch_kernel(kernel, stream);
    timer.after(stream);
  }
}

// The last copies of weights continue after the execution.
void AscendResident::release() noexcept {
  if (steps_) steps_->weights()->rest();
  model_.reset();
  if (steps_) steps_->weights()->close();
  steps_.reset();
  if (refresh_) last_counts_ = refresh_->counts();
  refresh_.reset();
  arena_.reset();
}

// Destroying the model makes the runtime wait for its executions, but not for kernels that were
// issued one by one.
void AscendResident::abandon() noexcept {
  model_.reset();
  static_cast<void>(new (std::nothrow) std::shared_ptr<StreamedSteps>(std::move(steps_)));
  static_cast<void>(refresh_.release());
  if (arena_) arena_->abandon();
}

}  // namespace offload::acl
