#include "ascend/captured_resident.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {

Model capturing_model(const Runtime& runtime, Stream stream) {
  runtime.require(Capability::kCapture, "capturing a model");
  CaptureStatus status = kCaptureNone;
  Model model = nullptr;
  runtime.check(runtime.capture_get_info(stream, &status, &model), "asking for the captured model");
  if (status == kCaptureInvalidated) throw ExecutionError("the capture has been invalidated");
  if (status != kCaptureActive || model == nullptr) {
    throw ExecutionError("nothing is being captured on the stream");
  }
  return model;
}

void abandon_capture(const Runtime& runtime, Stream stream) noexcept {
  CaptureStatus status = kCaptureNone;
  Model model = nullptr;
  if (!runtime.has(Capability::kCapture) ||
      runtime.capture_get_info(stream, &status, &model) != kSuccess || status == kCaptureNone) {
    return;
  }
  if (runtime.capture_end(stream, &model) == kSuccess && model != nullptr) {
    runtime.model_destroy(model);
  }
}

CapturedResident::CapturedResident(CapturedProgram program)
    : StreamResident(program.device, /*copies_on_device=*/true),
      program_(std::move(program)),
      arguments_(runtime(), std::move(program_.arguments),
                 program_.table ? &program_.table->table() : nullptr),
      random_(runtime(), program_.random_cells) {
  if (program_.slots.size() != program_.copies->size()) {
    throw std::invalid_argument("each tensor of a captured model needs one slot");
  }
  const ContextScope scope(runtime(), device());
  streams_ = streams_held(runtime(), program_.model, program_.steps ? 2 : 1);
  counted_ = std::make_unique<CountedStreams>(streams_.count);
  if (!program_.steps) return;
  program_.steps->weights()->attach(program_.n_launches, program_.for_next_pass);
}

CapturedResident::~CapturedResident() { close_for_good(); }

std::vector<Relocation> CapturedResident::relocations() const {
  std::vector<Relocation> relocations = arguments_.relocations();
  for (const std::uint32_t slot : program_.slots) {
    relocations.push_back({static_cast<std::uint32_t>(relocations.size()), slot, 0});
  }
  return relocations;
}

void CapturedResident::patch(const std::vector<Patch>& patches) noexcept {
  if (!program_.copies) return;  // closed
  const std::size_t n_words = arguments_.relocations().size();
  for (const Patch& patch : patches) {
    if (patch.word < n_words) {
      arguments_.patch(patch);
    } else {
      program_.copies->patch(patch.word - n_words, patch.address);
    }
  }
}

// After a failed wait, enqueued writes may not have happened.
void CapturedResident::heed_failure() {
  const bool timing_failed = program_.steps && program_.steps->weights()->take_failure();
  if (!take_failure() && !timing_failed) return;
  arguments_.distrust();
  program_.copies->distrust();
  random_.distrust();
  if (program_.steps) program_.steps->weights()->distrust();
}

void CapturedResident::set_random(const std::vector<std::uint64_t>& seeds_and_offsets) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  heed_failure();
  note_enqueued();
  random_.write(seeds_and_offsets, stream());
}

void CapturedResident::execute(Submission& submission, LaunchTimes* times) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  note_enqueued();
  heed_failure();
  AscendWeightStream* const weights = program_.steps ? program_.steps->weights().get() : nullptr;
  if (weights != nullptr && weights->begin_pass(stream())) submission.end_substage(kWeightsRead);
  arguments_.enqueue(stream(), submission);
  program_.copies->begin(stream(), submission);
  if (weights != nullptr) {
    weights->execute(program_.model, stream(), submission);
  } else {
    runtime().check(runtime().model_execute_async(program_.model, stream()),
                    "executing the captured model");
  }
  submission.end(kExecuteEnqueue);
  program_.copies->end(stream());
  if (times == nullptr) return;
  std::fill(times->begin_ns.begin(), times->begin_ns.end(), submission.end_ns);
  std::fill(times->end_ns.begin(), times->end_ns.end(), submission.end_ns);
}

std::optional<OwnArena> CapturedResident::arena() const {
  if (arguments_.home() == 0) return std::nullopt;
  return OwnArena{arguments_.home()};
}

void CapturedResident::issue(std::size_t) {
  throw ExecutionError("a model that torch captured is executed as a whole, never by launches");
}

CopyCounts CapturedResident::counts() const {
  return program_.copies ? program_.copies->counts() : last_counts_;
}

void CapturedResident::release() noexcept {
  if (!program_.copies) return;
  last_counts_ = program_.copies->counts();
  if (program_.steps) program_.steps->weights()->rest();  // its last copies continue
  program_.copies.reset();
  program_.release();
  program_.table.reset();  // no task reads it any more
  if (program_.steps) program_.steps->weights()->close();
  program_.steps.reset();
  counted_.reset();
}

// Model, copies, table and pool stay until the process ends: destroying them would free what may be
// running.
void CapturedResident::abandon() noexcept {
  static_cast<void>(new (std::nothrow) CapturedProgram(std::move(program_)));
  static_cast<void>(counted_.release());
}

}  // namespace offload::acl
